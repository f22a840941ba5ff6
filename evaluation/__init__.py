"""How fast, how right and how good hetplan's own parts are: `python -m evaluation`."""

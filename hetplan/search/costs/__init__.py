"""What plans of a family cost, as arrays: everything that bounds and programs are made of."""

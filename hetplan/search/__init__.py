"""The best plan for a job, with a bound on how far from the best it can be."""

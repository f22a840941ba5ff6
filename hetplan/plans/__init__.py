"""What runs where: the plan, its legality and what each trainer can run."""

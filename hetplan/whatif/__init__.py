"""What another question would give: why no plan, what limits a plan, what a change is worth."""

"""What a plan draws from the wall and costs."""

"""What is impossible or suspicious in what a user gives."""

"""What this machine has, and what hetplan can measure here."""

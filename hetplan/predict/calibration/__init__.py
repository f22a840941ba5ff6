"""What measured steps say about predicted ones."""

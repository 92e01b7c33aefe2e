"""What a backend implements and what it is given."""

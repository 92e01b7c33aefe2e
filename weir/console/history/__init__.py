"""What the console remembers: the load of the last hour."""

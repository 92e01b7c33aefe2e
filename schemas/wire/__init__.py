"""Messages between roles."""

"""Model instances and the backends that run them (floor 2)."""

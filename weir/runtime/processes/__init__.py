"""A process of this host: whether it still runs, and what it uses."""

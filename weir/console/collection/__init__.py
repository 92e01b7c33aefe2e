"""What the console collects over the bus, once a second."""

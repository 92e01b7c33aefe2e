"""Which scheduler owns which queue."""

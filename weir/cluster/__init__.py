"""What any process can learn about a whole cluster over the bus: its state, its problems, its counters."""

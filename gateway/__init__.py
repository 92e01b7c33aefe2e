"""Front doors: HTTP and gRPC, and what they share (floor 2)."""

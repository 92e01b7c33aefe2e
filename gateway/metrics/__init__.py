"""The metrics endpoint: Triton's metrics under their names, and Weir's own."""

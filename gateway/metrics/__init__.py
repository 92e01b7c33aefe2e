"""The metrics endpoint: Triton's metrics under its names, and Weir's own."""

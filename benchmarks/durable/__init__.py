"""Load and data for the benchmarks of durable requests and offline jobs."""

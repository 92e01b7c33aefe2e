"""Roles as separate processes on one nats-server, models with a fixed time, and clients, for cluster benchmarks."""

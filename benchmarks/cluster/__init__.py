"""Roles as processes of their own on one nats-server, models of a fixed time, and clients: for benchmarks of a cluster."""

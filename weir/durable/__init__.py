"""Durable requests: published to a stream on disk, run at least once, and recorded exactly once."""

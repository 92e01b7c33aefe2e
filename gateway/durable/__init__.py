"""Durable requests: taken from stream QUEUE, run as any other, recorded in stream RESULT."""

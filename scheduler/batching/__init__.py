"""Queues and batchers: lanes, priorities, the dynamic batcher, custom batching strategies."""

"""Sequence batching: slots, order, progress of sequences."""

"""Event logs: what a scheduler records, and what replays it."""

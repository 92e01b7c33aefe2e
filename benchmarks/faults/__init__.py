"""The fault suite: `python -m benchmarks.faults` says what becomes of requests while everything goes wrong."""

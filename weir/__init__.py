"""The command line, and the supervisor behind `weir serve` (floor 3)."""

__version__ = "0.1.0"

NATS_URL_VARIABLE = "WEIR_NATS_URL"
"""Tells a role where the bus is. Not an argument when `weir serve` does it: those can be read by every local user."""

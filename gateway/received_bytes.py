"""`ReceivedBytes`: what a gateway holds in ordinary memory of the bodies of requests, and how much it may be.

Large bodies are received in payload slots, which have a bound of their own; what finds none there lies here, and what comes
over gRPC. A sender is refused by what it says it will send, before any of it is kept. No IO.
"""

from __future__ import annotations

MAX_RECEIVED_BYTES = 512 * 1024 * 1024
"""Of all requests together; one alone may be larger."""


class ReceivedBytes:
    """See the module. `refused` counts requests for which there was no room."""

    __slots__ = ("held", "refused")

    def __init__(self) -> None:
        self.held = 0
        self.refused = 0

    def take(self, size_bytes: int) -> bool:
        """Whether there is room for so much more, which is taken then."""
        if self.held and self.held + size_bytes > MAX_RECEIVED_BYTES:
            self.refused += 1
            return False
        self.held += size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        """So much is held no more."""
        self.held -= size_bytes

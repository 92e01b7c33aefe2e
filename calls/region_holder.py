"""`RegionHolder`: what callers must know of the shared memory of clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from calls.payload_store import Freeable


class RegionHolder(Protocol):
    """Who knows the shared-memory regions that clients have registered."""

    def hold(self, model: str, names: Sequence[str]) -> Freeable:
        """Keeps regions registered for a request to `model`. Raises WeirError (UNSUPPORTED) if its workers lack them."""

"""`HealthReports`: takes word from instances' threads to the event loop that the health of a model has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class HealthReports:
    """See the module. `listener(identity of the model)` is called in the event loop in which this was made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.listener: Callable[[str], None] = lambda identity: None

    def changed(self, identity: str) -> None:
        """The health of a version of the model has changed; for any thread."""
        try:
            self._loop.call_soon_threadsafe(self._tell, identity)
        except RuntimeError:
            pass  # the worker has ended

    def _tell(self, identity: str) -> None:
        self.listener(identity)

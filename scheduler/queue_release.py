"""How a scheduler lets go of a queue: what has come from it is run, within reason, and nothing more is begun."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from scheduler.owned_model import OwnedModel

RELEASE_PATIENCE_S = 1.0
"""A queue that is handed over waits for so long for what has come from it; more may wait than will run in that time."""

BATCHES_PATIENCE_S = 5.0
"""And for so long for what runs by then."""

_POLL_S = 0.02


async def let_run(owned: OwnedModel, has_batches: Callable[[], bool]) -> None:
    """Returns when nothing of the queue runs any more; what has not begun by then is for its next owner."""
    owned.close()
    await wait_until(lambda: not len(owned.scheduler), RELEASE_PATIENCE_S)
    owned.stopped = True
    await wait_until(lambda: not has_batches(), BATCHES_PATIENCE_S)


async def wait_until(is_so: Callable[[], bool], timeout_s: float) -> None:
    """Returns when it is so, or the time is over."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so() and time.monotonic() < deadline_s:
        await asyncio.sleep(_POLL_S)

"""`end_last_tasks`: the end of a role is the end of all its tasks."""

from __future__ import annotations

import asyncio
import logging

logger = logging.getLogger("weir.telemetry")

_AGAIN_S = 0.2
_TIMES = 25


async def end_last_tasks() -> None:
    """Cancels what still runs in this event loop, again and again until it has ended; called when all else is closed.

    Who was told to end may go on: `asyncio.wait_for` of Python 3.11 loses a cancellation that comes in the same turn as
    what it waits for (python/cpython#86296), and nats-py waits so for each answer of the broker.
    """
    for _ in range(_TIMES):
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if not others:
            return
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=_AGAIN_S)
    logger.warning("%d tasks have not ended: %s", len(others), ", ".join(sorted(map(str, others)))[:2000])

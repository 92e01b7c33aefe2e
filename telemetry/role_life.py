"""`run_role`: the life of a role's process in its event loop, which is the same for all of them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from runtime import loop_lag
from telemetry.last_tasks import end_last_tasks

_ENDS = (signal.SIGTERM, signal.SIGINT)


def run_role(role: Callable[[asyncio.Event, asyncio.TaskGroup], Coroutine[Any, Any, int]]) -> int:
    """Runs `role` until it returns its exit status, which is returned once nothing of it runs any more.

    The event it is given is set when it is told to end (SIGTERM, SIGINT). Its background tasks are for the group: one that
    fails takes the role down with it, for better a restart than half a role.
    """
    return uvloop.run(_live(role))


async def _live(role: Callable[[asyncio.Event, asyncio.TaskGroup], Coroutine[Any, Any, int]]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _ENDS:
        loop.add_signal_handler(number, stop.set)
    loop_lag.ROLE.start(loop)
    try:
        async with asyncio.TaskGroup() as background:
            status = await role(stop, background)
            await end_last_tasks()
    finally:
        loop_lag.ROLE.stop()
    return status

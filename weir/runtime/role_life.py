"""`run_role`: the event loop of a role's process, from its start to the end of its last task."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from weir.runtime import loop_lag
from weir.runtime.containment import report
from weir.runtime.limits.open_files import raise_open_files
from weir.runtime.process_memory import keep_freed_memory
from weir.runtime.processors import finish_before_woken

logger = logging.getLogger("weir.runtime")

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_role(role: Callable[[asyncio.Event, asyncio.TaskGroup], Coroutine[Any, Any, int]]) -> int:
    """Runs `role` until it returns its exit status; returns that once no task of it runs any more.

    `role` receives an event that SIGTERM or SIGINT sets, and a task group for its background tasks. A background task
    that fails ends the role, because a restart is better than half a role. The process may open as many files as its hard
    limit allows. Where native code crashes the process, as a
    model's library may, the stacks of all threads are written to stderr.
    """
    faulthandler.enable()
    raise_open_files()
    keep_freed_memory()
    finish_before_woken()
    return uvloop.run(_run(role))


async def _run(role: Callable[[asyncio.Event, asyncio.TaskGroup], Coroutine[Any, Any, int]]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    loop.set_exception_handler(_contain)
    loop_lag.ROLE.start(loop)
    try:
        async with asyncio.TaskGroup() as background:
            status = await role(stop, background)
            await cancel_remaining_tasks()
    finally:
        loop_lag.ROLE.stop()
    return status


def _contain(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Counts and logs what a timer or another callback has raised, or a connection, which the loop has closed."""
    error = context.get("exception")
    if isinstance(error, Exception) and ("handle" in context or "protocol" in context):
        report("weir.runtime.role_life: a callback of the event loop", error)
    else:
        loop.default_exception_handler(context)


_ROUND_S = 0.2
_ROUNDS = 25


async def cancel_remaining_tasks() -> None:
    """Cancels all other tasks of this event loop, repeatedly until they have ended. Call it last.

    A task may survive a cancellation: `asyncio.wait_for` of Python 3.11 loses one that comes in the same turn as its
    result (python/cpython#86296).
    """
    for _ in range(_ROUNDS):
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if not others:
            return
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=_ROUND_S)
    logger.warning("%d tasks ignored their cancellation: %s", len(others), ", ".join(sorted(map(str, others)))[:2000])

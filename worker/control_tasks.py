"""`ControlTasks`: what goes on behind the back of a worker's model control."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from runtime.containment import contained


class ControlTasks:
    """See the module. At the end operations are cancelled, and endings, which give up what is held, are waited for."""

    def __init__(self) -> None:
        self._background: asyncio.TaskGroup | None = None
        self._is_ending = False
        self._operations: set[asyncio.Task[None]] = set()
        self._endings: set[asyncio.Task[None]] = set()

    @property
    def is_open(self) -> bool:
        """Whether there may be operations: neither before the start nor at the end."""
        return self._background is not None and not self._is_ending

    def start(self, background: asyncio.TaskGroup) -> None:
        """Tasks are those of `background` from now on."""
        self._background = background

    def operate(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """An operation."""
        return self._keep(work, self._operations)

    def end(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """An ending."""
        return self._keep(work, self._endings)

    def cancel_operations(self) -> None:
        """No operation goes on, and none is begun."""
        self._is_ending = True
        for task in self._operations:
            task.cancel()

    async def await_endings(self, timeout_s: float) -> None:
        """Returns when everything has ended that was to, or after `timeout_s`."""
        if self._endings:
            await asyncio.wait(self._endings, timeout=timeout_s)

    def _keep(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        assert self._background is not None  # noqa: S101 - started before there is anything to do
        task = self._background.create_task(self._run(work))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    @contained()
    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        await work

"""`SharedPage`: one rendering of a page for all clients that ask for it at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

RENDERING_SHARE = 0.2
"""The part of the time that may be spent on renderings, however many clients ask for the page."""

MAX_PAUSE_S = 1.0
"""The longest pause for that after a rendering, which may have taken long because another process did not reply."""


class SharedPage:
    """A page that `render` builds; `clock` returns monotonic seconds.

    A client gets a page whose rendering began after it asked: what it has done before is counted there. Clients that ask
    during a rendering share the next one, which begins after a pause: renderings take `RENDERING_SHARE` of the time.
    """

    def __init__(
        self,
        render: Callable[[], Awaitable[bytes]],
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._render = render
        self._clock = clock
        self._sleep = sleep
        self._next: asyncio.Task[bytes] | None = None
        self._turn = asyncio.Lock()
        self._free_at_s = 0.0

    async def get(self) -> bytes:
        """The page. Raises what `render` raises."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._render_next())
        return await asyncio.shield(self._next)  # a client that leaves does not end it for the others

    async def _render_next(self) -> bytes:
        async with self._turn:
            wait_s = self._free_at_s - self._clock()
            if wait_s > 0:
                await self._sleep(wait_s)
            self._next = None
            began_s = self._clock()
            try:
                return await self._render()
            finally:
                ended_s = self._clock()
                self._free_at_s = ended_s + min(MAX_PAUSE_S, (ended_s - began_s) * (1 / RENDERING_SHARE - 1))

"""Coroutines of a model: waited for, or, in a decoupled model, left to run on while other batches come."""

from __future__ import annotations

import traceback
import types
from collections.abc import Callable
from typing import Any


class Coroutines:
    """One event loop for all coroutines of a model; it is made, and runs in a thread, only once it is needed."""

    def __init__(self) -> None:
        self._loop: Any = None
        self._runs_in_thread = False
        self._running: set[Any] = set()  # a loop itself does not keep what it runs

    def awaited(self, result: Any) -> Any:
        """The coroutine's result; anything else is a result itself."""
        if not isinstance(result, types.CoroutineType):
            return result
        import asyncio  # a third of the start-up time, which few models need

        if self._runs_in_thread:
            return asyncio.run_coroutine_threadsafe(result, self._loop).result()
        return self._made_loop().run_until_complete(result)

    def awaited_elsewhere(self, result: Any) -> Any:
        """As `awaited`, for a thread beside the one that runs batches: its loop may be running, or begin to."""
        if not isinstance(result, types.CoroutineType) or self._runs_in_thread:
            return self.awaited(result)
        import asyncio

        return asyncio.run(result)

    def start(self, coroutine: Any, on_error: Callable[[BaseException], None]) -> None:
        """Runs the coroutine in the loop's thread; `on_error` is called there if it raises."""
        import asyncio
        import threading

        loop = self._made_loop()
        if not self._runs_in_thread:
            self._runs_in_thread = True
            threading.Thread(target=self._run_loop, name="event loop", daemon=True).start()

        async def run() -> None:
            try:
                await coroutine
            except BaseException as error:  # noqa: BLE001  # user code
                on_error(error)

        future = asyncio.run_coroutine_threadsafe(run(), loop)
        self._running.add(future)
        future.add_done_callback(self._running.discard)

    def _run_loop(self) -> None:
        while True:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                # A task of the model's has asked for its end: whoever awaits it hears of that, the others go on.
                traceback.print_exc()

    def _made_loop(self) -> Any:
        if self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
        return self._loop

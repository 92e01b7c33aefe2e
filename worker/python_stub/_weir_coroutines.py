"""Coroutines of a model: waited for, or, in a decoupled model, left to run on while other batches come."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

from _weir_logger import log_exception


class Coroutines:
    """One event loop for all coroutines of a model. It is made, and its thread started, with the first coroutine.

    The loop always runs in its own thread: tasks and callbacks that a coroutine leaves behind go on after it.
    """

    def __init__(self) -> None:
        self._loop: Any = None
        self._starting = threading.Lock()
        self._has_started = False
        self._running: set[Any] = set()  # a loop itself does not keep what it runs

    def awaited(self, result: Any) -> Any:
        """The coroutine's result; anything else is a result itself. Not for the loop's thread."""
        if not isinstance(result, types.CoroutineType):
            return result
        import asyncio  # a third of the start-up time, which few models need

        return asyncio.run_coroutine_threadsafe(result, self._running_loop()).result()

    def awaited_elsewhere(self, result: Any) -> Any:
        """As `awaited`, but in a loop of its own where `execute` is waited for: it may block the other loop."""
        if not isinstance(result, types.CoroutineType) or self._has_started:
            return self.awaited(result)
        import asyncio

        return asyncio.run(result)

    def start(self, coroutine: Any, on_error: Callable[[BaseException], None]) -> None:
        """Runs the coroutine in the loop's thread; `on_error` is called there if it raises."""
        import asyncio

        async def run() -> None:
            try:
                await coroutine
            except BaseException as error:  # noqa: BLE001  # user code
                on_error(error)

        self._has_started = True
        future = asyncio.run_coroutine_threadsafe(run(), self._running_loop())
        self._running.add(future)
        future.add_done_callback(self._running.discard)

    def _running_loop(self) -> Any:
        import asyncio

        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._run_loop, name="event loop", daemon=True).start()
        return self._loop

    def _run_loop(self) -> None:
        import asyncio

        asyncio.set_event_loop(self._loop)
        while True:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                # A task of the model's has asked for its end: whoever awaits it hears of that, the others go on.
                log_exception("a task of the model has asked for the end of its event loop, which goes on", error)

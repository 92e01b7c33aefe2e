"""`ResponseIterator`: the responses of a decoupled model to a request of another model, one after another."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

from _weir_calls import MAX_KEPT_BYTES, MAX_UNREAD_BYTES, OnResponse, current_calls
from _weir_errors import TritonError, TritonModelException
from _weir_response import InferenceResponse


class ResponseIterator:
    """Iterates over responses as they arrive, with `for` and with `async for`, in any thread.

    The last one may have no outputs. Once all have been read, a new iteration starts with the first again, unless they
    were too large to be kept. The request continues when nothing reads the responses, also when the iterator is deleted,
    unless `cancel` was called.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._unread: deque[InferenceResponse] = deque()
        self._unread_bytes = 0
        self._kept: list[InferenceResponse] | None = []
        self._kept_bytes = 0
        self._position: int | None = None  # index into `_kept` of the next one to read again
        self._is_complete = False
        self._waiters: list[tuple[Any, Any]] = []
        self._number: int | None = None

    def receiver(self) -> OnResponse:
        """The function to be called with the responses; it does not keep the iterator alive."""
        reference = weakref.ref(self)

        def receive(response: InferenceResponse, is_final: bool) -> None:
            responses = reference()
            if responses is not None:
                responses._receive(response, is_final)

        return receive

    def started(self, number: int) -> None:
        """Records the number of the call."""
        self._number = number

    def __iter__(self) -> ResponseIterator:
        with self._changed:
            if self._is_complete and not self._unread:
                if self._kept is None:
                    raise TritonModelException("the responses were too large to be kept for another iteration")
                self._position = 0
        return self

    def __next__(self) -> InferenceResponse:
        with self._changed:
            while (response := self._next()) is None:
                self._changed.wait()
        if isinstance(response, InferenceResponse):
            return response
        raise StopIteration("Iteration is done for the responses.")

    def __aiter__(self) -> ResponseIterator:
        return self.__iter__()

    async def __anext__(self) -> InferenceResponse:
        while True:
            with self._changed:
                response = self._next()
                if response is None:
                    woken = self._waiter()
            if isinstance(response, InferenceResponse):
                return response
            if response is not None:
                raise StopAsyncIteration
            await woken

    async def first_response(self) -> ResponseIterator:
        """Returns the iterator once the first response has arrived, which can then be read without `await`, as in Triton.

        Cancelling this cancels the request.
        """
        with self._changed:
            woken = None if self._unread or self._is_complete else self._waiter()
        if woken is not None:
            try:
                await woken
            except BaseException:
                self._abandon()
                raise
        return self

    def _waiter(self) -> Any:
        """A future of the running loop that is done after the next response. The caller holds the lock."""
        import asyncio

        loop = asyncio.get_running_loop()
        woken = loop.create_future()
        self._waiters.append((loop, woken))
        return woken

    def cancel(self) -> None:
        """Cancels the request; does nothing once its final response has arrived.

        The iteration goes on to the end that the called model makes: its `is_cancelled()` is true from now on, and a model
        that looks at it ends with an error of code CANCELLED. A request that has no response yet ends so at once.
        """
        if self._number is not None:
            current_calls().cancel_and_listen(self._number)

    def _abandon(self) -> None:
        """Cancels the request, whose responses nothing will read."""
        if self._number is not None:
            current_calls().cancel(self._number)
        with self._changed:
            self._end()

    def __del__(self) -> None:
        number = getattr(self, "_number", None)
        if number is not None and not self._is_complete:
            current_calls().ignore(number)

    def _next(self) -> InferenceResponse | bool | None:
        """The next response, False after the last, None while it has not arrived."""
        if self._position is not None and self._kept is not None and self._position < len(self._kept):
            self._position += 1
            return self._kept[self._position - 1]
        if not self._unread:
            return False if self._is_complete else None
        response = self._unread.popleft()
        size_bytes = response.size_bytes()
        self._unread_bytes -= size_bytes
        self._kept_bytes += size_bytes
        if self._kept_bytes > MAX_KEPT_BYTES:
            self._kept = None
        if self._kept is not None:
            self._kept.append(response)
        return response

    def _receive(self, response: InferenceResponse, is_final: bool) -> None:
        with self._changed:
            if self._is_complete:
                return
            self._unread_bytes += response.size_bytes()
            # A response alone may be larger: it is here already, and reading faster would not have helped.
            is_flooded = bool(self._unread) and self._unread_bytes > MAX_UNREAD_BYTES
            if is_flooded:
                text = "the responses came faster than they were read, and the request was cancelled"
                response = InferenceResponse(error=TritonError(text, TritonError.UNAVAILABLE))
            self._unread.append(response)
            if is_final or is_flooded:
                self._end()
            self._wake()
        if is_flooded and self._number is not None:
            current_calls().cancel(self._number)

    def _end(self) -> None:
        self._is_complete = True
        self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        for loop, woken in self._waiters:
            try:
                loop.call_soon_threadsafe(_set_done, woken)
            except RuntimeError:
                pass  # the loop has ended, so nothing waits in it
        self._waiters.clear()


def _set_done(woken: Any) -> None:
    if not woken.done():
        woken.set_result(None)

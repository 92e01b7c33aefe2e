"""`ProcessMicrobatch`: requests that the process of a Python model runs one after another, each alone, from one message.

A message there and back for each request would cost more than a fast model takes: two system calls and a switch between
processes each way. Here the process gets all requests at once, takes a ticket before it starts each one, and appends its
outcome to shared memory. The worker needs no message to see how far the process is, and can take back the tickets of
requests that have not started at any time.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgpack

from weir.runtime.containment import contained
from weir.schemas.core.errors import internal
from weir.worker.backend_api.interface import EndedRequest, Result
from weir.worker.python_stub._weir_channel import Channel, StartTickets
from weir.worker.python_stub._weir_memory import MemoryReader

_CHUNK_BYTES = 64 * 1024
_MAX_OUTCOME_BYTES = 1 << 29
_OUTCOME_FIELDS = 4  # start, end, status, value


class OutcomeReader:
    """Reads the outcomes that a process appends to `memory`."""

    def __init__(self, memory: MemoryReader) -> None:
        self._memory = memory
        self._position = 0

    def rewind(self) -> None:
        """Starts at the beginning of the memory, for the next microbatch."""
        self._position = 0

    def read(self, count: int, end: int | None = None) -> list[Any]:
        """The next `count` outcomes, which are complete, and the last ones where `end` is given: where they end in bytes.

        Raises ValueError or TypeError unless there are that many outcomes.
        """
        start = position = self._position
        unpacker = msgpack.Unpacker(use_list=False, max_buffer_size=_MAX_OUTCOME_BYTES)
        outcomes: list[Any] = []
        while len(outcomes) < count:
            size = min(self._memory.size_bytes - position, _CHUNK_BYTES) if end is None else end - position
            if size <= 0:
                raise ValueError(f"{len(outcomes)} outcomes of {count} requests")
            unpacker.feed(self._memory.view(position, size))
            position += size
            try:
                while len(outcomes) < count:
                    outcomes.append(unpacker.unpack())
            except msgpack.OutOfData:
                continue
        self._position = start + unpacker.tell()
        if any([len(outcome) != _OUTCOME_FIELDS for outcome in outcomes]):  # noqa: C419 - faster than a generator
            raise ValueError("an outcome has other fields")
        return outcomes


class MicrobatchHost(NamedTuple):
    """What a microbatch needs of its process.

    `result` makes a result from the status and the value of an outcome. `ended` is called once, with the number of requests
    that the model does not respond to later. `died` ends the process after an error on its channel or in its memory, and
    returns why it ended.
    """

    commands: Channel
    tickets: StartTickets
    outcomes: OutcomeReader
    result: Callable[[int, Any], Result | None]
    ended: Callable[[int], None]
    died: Callable[[BaseException], str]


class ProcessMicrobatch:
    """Implements `weir.worker.backend_api.interface.MicrobatchRun` for `count` requests, the message with which was sent.

    `on_close` is called by `close`, in the instance's thread.
    """

    def __init__(self, host: MicrobatchHost, count: int, on_close: Callable[[ProcessMicrobatch], None]) -> None:
        self.death = ""
        self._host = host
        self._count = count
        self._on_close = on_close
        self._lock = threading.Lock()  # no ticket is taken back after the end: it would be one of the next microbatch
        self.withdrawn = range(count, count)
        self._taken_back = 0
        self._has_ended = False
        self._ended: list[EndedRequest] = []
        self._read = 0
        self._sent_later = 0
        self._last_left = count
        self._last_start_s = 0.0
        self._poller = select.poll()
        self._poller.register(host.commands.fileno(), select.POLLIN)

    def wait(self, timeout_s: float | None) -> bool:
        """Whether the microbatch, or its process, ends within `timeout_s` (None: no limit)."""
        if self._has_ended:
            return True
        if not self._poller.poll(None if timeout_s is None else timeout_s * 1000):
            return False
        try:
            _, outcomes_end = self._host.commands.receive()
        except (EOFError, OSError, ValueError, TypeError, MemoryError) as error:
            self._end()
            self._collect(self._started() - 1)
            self._died(error)
            return True
        self._end()
        if self._collect(self._started(), outcomes_end):
            self._host.ended(self._count - self._sent_later)
        return True

    def ended(self) -> Sequence[EndedRequest]:
        """The requests that have ended since the last call, in order."""
        if not self._has_ended:
            self._collect(self._started() - 1)
        ended, self._ended = self._ended, []
        return ended

    @property
    def lost(self) -> range:
        """The positions of the requests that were running when the process ended, after `wait` has returned True."""
        if not self.death:
            return range(0)
        # A process that dies before the first request is counted as one that this request kills.
        return range(self._read, max(self._started(), self._read + 1))

    def withdraw(self) -> range:
        """Takes back the requests that have not started; returns their positions. For any thread."""
        with self._lock:
            before = self._count - self._taken_back
            if not self._has_ended:
                self._take_back()
                self.withdrawn = range(self._count - self._taken_back, self._count)
            return range(self._count - self._taken_back, before)

    @property
    def unstarted(self) -> int:
        """How many requests have not started. For any thread."""
        with self._lock:
            return 0 if self._has_ended else self._host.tickets.left

    def last_start_s(self, now_s: float) -> float:
        """When this method first saw the request that runs now, 0 for the first one. For the watchdog's thread."""
        with self._lock:
            left = self._last_left if self._has_ended else self._host.tickets.left
        if left != self._last_left:
            self._last_left, self._last_start_s = left, now_s
        return self._last_start_s

    def close(self) -> None:
        """The results have been read: the instance may run the next batch."""
        self._on_close(self)

    def _take_back(self) -> None:
        self._taken_back += self._host.tickets.take(self._count)

    def _started(self) -> int:
        with self._lock:
            return self._count - self._taken_back - (0 if self._has_ended else self._host.tickets.left)

    def _end(self) -> None:
        with self._lock:
            self._take_back()
            self._has_ended = True

    def _collect(self, finished: int, outcomes_end: int | None = None) -> bool:
        """Reads the outcomes up to that of the request at position `finished`; returns whether they could be read."""
        count = finished - self._read
        if count <= 0:
            return True
        try:
            outcomes = self._host.outcomes.read(count, outcomes_end)
        except (ValueError, TypeError) as error:
            # The model has written into the memory: nothing in it can be trusted.
            if not self._has_ended:
                self._end()
            self._died(error)
            return False
        ended = [
            EndedRequest(position, self._result(status, value), start_ns, end_ns)
            for position, (start_ns, end_ns, status, value) in enumerate(outcomes, self._read)
        ]
        self._read = finished
        self._sent_later += sum(request.result is None for request in ended)
        self._ended += ended
        return True

    def _died(self, error: BaseException) -> None:
        if not self.death:
            self.death = self._host.died(error)

    @contained(on_error="_conversion_failed")
    def _result(self, status: int, value: Any) -> Result | None:
        return self._host.result(status, value)

    def _conversion_failed(self, error: Exception, _status: int, _value: Any) -> Result:
        return Result(error=internal(f"the response can't be read: {type(error).__name__}: {error}"))

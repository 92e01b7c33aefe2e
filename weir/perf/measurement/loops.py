"""`ClosedLoop` and `OpenLoop`: send requests until they are stopped, and count what becomes of them in a window."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections import deque
from itertools import count

from weir.perf.clients.session import CallFailed, Client, Session
from weir.perf.load.arrivals import Arrivals
from weir.perf.load.sequences import Sequence, SequenceSource
from weir.perf.measurement.distribution import Window
from weir.perf.measurement.precise_timer import PreciseTimer

RECONNECT_WAIT_S = 0.05
"""A session whose connection failed waits so long before its next request."""

DRAIN_S = 5.0
"""When a loop stops, requests in flight have so long to be answered; then they are cancelled."""

_CLOSE_S = 1.0


class _Place:
    """One session, and the sequence that it sends at present."""

    __slots__ = ("sequence", "session")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.sequence: Sequence | None = None


class LoadLoop(ABC):
    """Sends the samples of `client` in turn; with `sequences`, each session sends one sequence after the other.

    `window` is replaced by the caller: a request counts in the window in which it ends. With `streams` the times of all
    responses are counted.
    """

    def __init__(self, client: Client, samples: int, sequences: SequenceSource | None, streams: bool) -> None:
        self.window = Window(time.perf_counter())
        self._client = client
        self._samples = samples
        self._numbers = count()
        self._sequences = sequences
        self._streams = streams
        self._places: list[_Place] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    @abstractmethod
    def start(self, group: asyncio.TaskGroup) -> None:
        """Sends from now on, with tasks of `group`."""

    async def stop(self, drain_s: float = DRAIN_S) -> int:
        """Sends no more, waits up to `drain_s` for responses, and ends open sequences. Returns how many had none."""
        self._stopping = True
        unanswered: set[asyncio.Task[None]] = set()
        if self._tasks:
            _, unanswered = await asyncio.wait(self._tasks, timeout=drain_s)
        for task in unanswered:
            task.cancel()
        await asyncio.gather(*unanswered, return_exceptions=True)
        await asyncio.gather(*map(self._leave, self._places))
        return len(unanswered)

    def _open(self) -> _Place:
        place = _Place(self._client.session())
        self._places.append(place)
        return place

    def _spawn(self, group: asyncio.TaskGroup, name: str, place: _Place, due_s: float) -> None:
        task = group.create_task(self._run(place, due_s), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @abstractmethod
    async def _run(self, place: _Place, due_s: float) -> None:
        """Sends what a task sends."""

    async def _call(self, place: _Place, from_s: float) -> bool:
        """One request, whose latency counts from `from_s`. Returns whether the connection failed."""
        step = None
        if self._sequences is not None:
            if place.sequence is None or place.sequence.is_over:
                place.sequence = self._sequences.begin()
            step = place.sequence.next_step()
        sample = (next(self._numbers) if step is None else step.number) % self._samples
        try:
            answer = await place.session.infer(sample, step)
        except CallFailed as error:
            place.sequence = None  # the server may have ended it
            self.window.failure(str(error))
            return error.is_connection
        self.window.answered(from_s, answer, self._streams)
        return False

    async def _leave(self, place: _Place) -> None:
        with contextlib.suppress(CallFailed, TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                if place.sequence is not None and place.sequence.is_open:
                    await place.session.infer(0, place.sequence.last_step())
                await place.session.close()


class ClosedLoop(LoadLoop):
    """`concurrency` sessions that each send the next request when the previous one is answered."""

    def __init__(
        self, client: Client, samples: int, sequences: SequenceSource | None, streams: bool, concurrency: int
    ) -> None:
        super().__init__(client, samples, sequences, streams)
        self._concurrency = concurrency

    def start(self, group: asyncio.TaskGroup) -> None:
        """Starts the sessions."""
        for number in range(self._concurrency):
            self._spawn(group, f"session {number}", self._open(), 0.0)

    async def _run(self, place: _Place, due_s: float) -> None:
        while not self._stopping:
            if await self._call(place, time.perf_counter()):
                await asyncio.sleep(RECONNECT_WAIT_S)


class OpenLoop(LoadLoop):
    """Sends each request when `arrivals` has it due, whether or not earlier ones are answered.

    Latency counts from the time at which a request was due, so that a server that stalls does not hide the requests that
    would have come meanwhile. At most `max_in_flight` requests are in flight; further ones wait, and their time counts.
    """

    def __init__(  # noqa: PLR0913 - those of every loop, and two of its own
        self,
        client: Client,
        samples: int,
        sequences: SequenceSource | None,
        streams: bool,
        arrivals: Arrivals,
        max_in_flight: int,
    ) -> None:
        super().__init__(client, samples, sequences, streams)
        self._arrivals = arrivals
        self._max_in_flight = max_in_flight
        self._idle: deque[_Place] = deque()
        self._freed = asyncio.Event()
        self._dispatcher: asyncio.Task[None] | None = None

    def start(self, group: asyncio.TaskGroup) -> None:
        """Starts the schedule."""
        self._dispatcher = group.create_task(self._dispatch(group), name="arrivals")

    async def stop(self, drain_s: float = DRAIN_S) -> int:
        """Sends no more, waits up to `drain_s` for responses, and ends open sequences. Returns how many had none."""
        if self._dispatcher is not None:
            self._dispatcher.cancel()
            await asyncio.gather(self._dispatcher, return_exceptions=True)
        return await super().stop(drain_s)

    async def _dispatch(self, group: asyncio.TaskGroup) -> None:
        timer = PreciseTimer()
        began_s = time.perf_counter()
        try:
            while True:
                due_s = began_s + self._arrivals.next_s()
                await timer.sleep(due_s - time.perf_counter())
                place, free_s = await self._free_place()
                self.window.send_delay.add(max(0.0, time.perf_counter() - max(due_s, free_s)))
                self._spawn(group, "request", place, due_s)
        finally:
            timer.close()

    async def _free_place(self) -> tuple[_Place, float]:
        """A session without a request in flight, and since when it had to be waited for (0: not at all)."""
        free_s = 0.0
        while not self._idle:
            if len(self._places) < self._max_in_flight:
                return self._open(), free_s
            self._freed.clear()
            await self._freed.wait()
            free_s = time.perf_counter()
        # The one that has been idle for longest: with sequences, all of them proceed.
        return self._idle.popleft(), free_s

    async def _run(self, place: _Place, due_s: float) -> None:
        if await self._call(place, due_s):
            await asyncio.sleep(RECONNECT_WAIT_S)
        self._idle.append(place)
        self._freed.set()

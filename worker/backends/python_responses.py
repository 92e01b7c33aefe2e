"""`ResponseReader`: takes what a Python model sends by its response senders, and tells it who has given up.

A model may send at any time, from any of its threads, for requests of several batches, long after `execute` returned. So
this reads in a thread of its own, and hands each response on before it lets the model go on: nothing is kept here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from runtime.containment import contained
from schemas.errors import WeirError, internal, unavailable
from worker.backends.python_messages import PythonResponse, ResponseSink
from worker.python_stub._weir_channel import Channel, Kind

logger = logging.getLogger("weir.worker")

DROPPED = "the model finished with the request without sending a final response"
"""What a request fails with whose response sender the model has dropped."""


class _Run:
    __slots__ = ("has_returned", "sink", "size", "unanswered")

    def __init__(self, sink: ResponseSink, size: int) -> None:
        self.sink = sink
        self.size = size
        self.unanswered = size
        self.has_returned = False


class ResponseReader:
    """See the module. One for each process; its thread ends with the process's end of `channel`, or by `close`.

    `unpack` makes a response of what is sent, `failure` an error of what the model raised. A process that breaks the
    protocol is ended by `kill`. `on_end` is called in the thread when the process is gone. `last_heard_s` is when it sent
    something last, of `time.monotonic()`.
    """

    def __init__(
        self,
        channel: Channel,
        unpack: Callable[[Any, Any], PythonResponse],
        failure: Callable[[str], WeirError],
        kill: Callable[[], None],
        name: str,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.last_heard_s = 0.0
        self._on_end = on_end
        self._channel = channel
        self._unpack = unpack
        self._failure = failure
        self._kill = kill
        self._lock = threading.Lock()
        self._runs: dict[int, _Run] = {}
        self._last_run = 0
        self._has_ended = False
        self._thread = threading.Thread(target=self._read, name=f"{name} responses", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self._has_ended

    @property
    def has_open_runs(self) -> bool:
        """Whether requests have no last answer yet."""
        return bool(self._runs)

    def begin(self, sink: ResponseSink, size: int) -> int:
        """The number of a new run of so many requests; for the instance's thread alone."""
        self._last_run += 1
        self._runs[self._last_run] = _Run(sink, size)
        return self._last_run

    def returned(self, number: int, answered: int) -> None:
        """The run's `execute` has returned with so many answers; the other requests are answered through the sink."""
        run = self._runs.get(number)
        if run is None:
            return  # a coroutine of it has failed since
        if answered == run.size:
            self.forget(number)
            return
        with self._lock:
            run.has_returned = True
            run.unanswered -= answered
            if run.unanswered <= 0 or self._has_ended:
                self.forget(number)
            is_lost = run.unanswered > 0 and self._has_ended
        if is_lost:
            self._fail(run, process_lost())

    def forget(self, number: int) -> None:
        """The run has failed: nothing that comes for it is of use any more."""
        self._runs.pop(number, None)

    def close(self) -> None:
        """Ends the thread. What still had no last response is lost."""
        self._channel.shut_down()
        self._thread.join()

    def _read(self) -> None:
        try:
            while True:
                kind, *arguments = self._channel.receive()
                self.last_heard_s = time.monotonic()
                value = self._handle(kind, *arguments)
                self._channel.send(Kind.DONE, value)
        except (EOFError, OSError):
            pass  # the process has ended, or is being ended
        except Exception:
            # What it sent makes no sense, or can't be passed on: it can't be relied on any more.
            logger.exception("%s: the model's process is ended", self._thread.name)
            self._kill()
        with self._lock:
            self._has_ended = True
            lost = [number for number, run in list(self._runs.items()) if run.has_returned]
            runs = [self._runs.pop(number) for number in lost]
        for run in runs:
            self._fail(run, process_lost())
        self._on_end()

    @contained()
    def _fail(self, run: _Run, error: WeirError) -> None:
        run.sink.fail(error)

    def _handle(self, kind: int, number: int, *arguments: Any) -> Any:
        run = self._runs.get(number)
        if run is None:
            return False  # the run is over: nobody waits, and nobody gives up
        if kind == Kind.RUN_FAILED:
            self.forget(number)
            self._fail(run, self._failure(*arguments))
            return None
        position, *response = arguments
        if not 0 <= position < run.size:
            raise ValueError(f"there is no request {position}")
        if kind == Kind.DROPPED:
            self._respond(
                run, number, position, PythonResponse(error=self._failure(DROPPED), raised=True), is_final=True
            )
            return None
        if kind == Kind.IS_CANCELLED:
            return run.sink.is_cancelled(position)
        if kind != Kind.RESPONSE:
            raise ValueError(f"there is no question {kind}")
        packed, is_final = response
        self._respond(run, number, position, None if packed is None else self._unpack(*packed), is_final)
        return None

    def _respond(self, run: _Run, number: int, position: int, response: PythonResponse | None, is_final: bool) -> None:
        self._pass_on(run, position, response, is_final)
        if is_final:
            with self._lock:
                run.unanswered -= 1
                if run.has_returned and run.unanswered <= 0:
                    self.forget(number)

    @contained(on_error="_passing_on_failed")
    def _pass_on(self, run: _Run, position: int, response: PythonResponse | None, is_final: bool) -> None:
        run.sink.respond(position, response, is_final)

    def _passing_on_failed(
        self, error: Exception, run: _Run, position: int, _response: PythonResponse | None, _is_final: bool
    ) -> None:
        failure = internal(f"the response can't be passed on: {type(error).__name__}: {error}")
        run.sink.respond(position, PythonResponse(error=failure, raised=True), True)


def process_lost() -> WeirError:
    """What a request ends with whose model's process has gone after some of its responses may have been seen."""
    return unavailable(
        "the model's process was lost while it was streaming the response; the request may be sent again"
    )

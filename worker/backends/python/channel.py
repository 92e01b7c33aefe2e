"""What the process of a Python model sends to its worker on its own: responses, at any time and for any open batch.

A model may send responses from any of its threads, for requests of several batches, also after `execute` has returned.
`ResponseReader` therefore reads them in a thread of its own and passes each one on before the model continues, so that
nothing is buffered here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from weir.runtime.containment import contained
from weir.schemas.core.errors import ErrorCode, WeirError, internal, unavailable
from weir.schemas.core.tensors import Tensor
from weir.worker.backend_api.interface import Execution, Result
from weir.worker.python_stub._weir_channel import Channel, Kind
from weir.worker.python_stub._weir_memory import MemoryReader

logger = logging.getLogger("weir.worker")

SENDER_DROPPED = "the model finished with the request without sending a final response"
"""The error of a request whose response sender the model has deleted."""


class _OpenRun:
    """One call of `execute` that has requests without a final response."""

    __slots__ = ("delivery_lock", "execution", "has_failed", "has_returned", "open_requests", "size")

    def __init__(self, execution: Execution, size: int) -> None:
        self.execution = execution
        self.size = size
        self.open_requests = size
        self.has_returned = False
        self.has_failed = False
        self.delivery_lock = threading.Lock()

    def respond(self, position: int, result: Result | None, is_final: bool) -> None:
        """Passes a response on, unless the whole run has failed."""
        with self.delivery_lock:
            if not self.has_failed:
                self.execution.respond(position, result, is_final)

    @contained()
    def fail(self, error: WeirError) -> None:
        """Ends all requests of the run that have no final response with `error`."""
        with self.delivery_lock:
            if not self.has_failed:
                self.execution.fail(error)


class ResponseReader:
    """Reads what one process sends on `channel`, in a thread that ends with the process, or by `close`.

    `instance` is the name of the instance, for error messages and the thread. Large outputs lie in `memory`. A process
    that violates the protocol is ended by `kill`. `on_end` is called in the thread when the process has ended.
    `last_received_s` is the time (`time.monotonic()`) of the last message, 0 before the first.
    """

    def __init__(
        self,
        channel: Channel,
        memory: MemoryReader,
        instance: str,
        kill: Callable[[], None],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.last_received_s = 0.0
        self._channel = channel
        self._memory = memory
        self._instance = instance
        self._kill = kill
        self._on_end = on_end
        self._lock = threading.Lock()
        self._runs: dict[int, _OpenRun] = {}
        self._last_run = 0
        self._has_ended = False
        self._thread = threading.Thread(target=self._read, name=f"{instance} responses", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether the process has closed the channel."""
        return self._has_ended

    @property
    def has_open_runs(self) -> bool:
        """Whether any request has no final response yet."""
        return bool(self._runs)

    def open_run(self, execution: Execution, size: int) -> int:
        """Registers a run of `size` requests and returns its number. Only for the instance's thread."""
        self._last_run += 1
        self._runs[self._last_run] = _OpenRun(execution, size)
        return self._last_run

    def returned(self, number: int, responses: int) -> None:
        """Records that `execute` returned with `responses` final responses; the model sends the others itself."""
        run = self._runs.get(number)
        if run is None:
            return  # one of its coroutines has failed since
        if responses == run.size:
            self._remove(number)
            return
        with self._lock:
            run.has_returned = True
            run.open_requests -= responses
            if run.open_requests <= 0 or self._has_ended:
                self._remove(number)
            is_lost = run.open_requests > 0 and self._has_ended
        if is_lost:
            run.fail(stream_lost())

    def fail_run(self, number: int) -> None:
        """Drops everything that the process still sends for a run whose `execute` has failed.

        After this returns no response of the run reaches its execution, so the batch may be run again.
        """
        run = self._runs.pop(number, None)
        if run is not None:
            with run.delivery_lock:
                run.has_failed = True

    def close(self) -> None:
        """Ends the thread. Requests without a final response fail."""
        self._channel.shut_down()
        self._thread.join()

    def _remove(self, number: int) -> None:
        self._runs.pop(number, None)

    def _read(self) -> None:
        try:
            while True:
                kind, *arguments = self._channel.receive()
                self.last_received_s = time.monotonic()
                value = self._handle(kind, *arguments)
                self._channel.send(Kind.DONE, value)
        except (EOFError, OSError):
            pass  # the process has ended, or is being ended
        except Exception:
            # The message is malformed, or its response could not be delivered: the process is in an unknown state.
            logger.exception("%s: killing the model's process, its message could not be handled", self._instance)
            self._kill()
        with self._lock:
            self._has_ended = True
            lost = [number for number, run in list(self._runs.items()) if run.has_returned]
            runs = [self._runs.pop(number) for number in lost]
        for run in runs:
            run.fail(stream_lost())
        self._on_end()

    def _handle(self, kind: int, number: int, *arguments: Any) -> Any:
        run = self._runs.get(number)
        if run is None:
            return False  # the run has ended: its response is dropped, and its requests are not cancelled
        if kind == Kind.RUN_FAILED:
            self._remove(number)
            run.fail(execution_error(self._instance, *arguments))
            return None
        position, *response = arguments
        if not 0 <= position < run.size:
            raise ValueError(f"request {position} of a run of {run.size}")
        if kind == Kind.DROPPED:
            dropped = Result(error=execution_error(self._instance, SENDER_DROPPED))
            self._respond(run, number, position, dropped, is_final=True)
            return None
        if kind == Kind.IS_CANCELLED:
            return run.execution.is_cancelled(position)
        if kind != Kind.RESPONSE:
            raise ValueError(f"unknown message kind {kind}")
        packed, is_final = response
        result = None if packed is None else unpack_response(self._memory, *packed)
        self._respond(run, number, position, result, is_final)
        return None

    def _respond(self, run: _OpenRun, number: int, position: int, result: Result | None, is_final: bool) -> None:
        run.respond(position, result, is_final)
        if is_final:
            with self._lock:
                run.open_requests -= 1
                if run.has_returned and run.open_requests <= 0:
                    self._remove(number)


def unpack_response(memory: MemoryReader, first: Any, second: Any) -> Result:
    """A response as its process packed it: (error code, message), or (outputs, parameters).

    Outputs of more than 64 KiB are read-only views of `memory`: those that `execute` returned stay valid until the next
    `execute` of the same process, those that a response sender sent until `Execution.respond` returns.
    """
    if isinstance(first, int):
        return Result(error=WeirError(ErrorCode.from_number(first), second), is_model_response=True)
    outputs = [
        Tensor(name, datatype, shape, content if isinstance(content, bytes) else memory.view(*content))
        for name, datatype, shape, content in first
    ]
    return Result(outputs, second)


def coded_error(reason: str | tuple[int, str]) -> WeirError | None:
    """The error of Weir's own code in a process, None for the text of another failure."""
    return None if isinstance(reason, str) else WeirError(ErrorCode.from_number(reason[0]), reason[1])


def execution_error(instance: str, reason: str | tuple[int, str]) -> WeirError:
    """The error of requests whose model raised an exception or broke the contract: INTERNAL, in Triton's words."""
    return coded_error(reason) or internal(
        f"Failed to process the request(s) for model '{instance}', message: {reason}"
    )


def stream_lost() -> WeirError:
    """The error (UNAVAILABLE) of a request whose process died after some of its responses may have been delivered."""
    return unavailable(
        "the model's process was lost while it was streaming the response; the request may be sent again"
    )

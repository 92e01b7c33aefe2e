"""What a worker and the process of a Python model say to each other about requests and their responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from schemas.errors import ErrorCode, WeirError
from schemas.requests import Parameters
from schemas.tensors import Tensor
from worker.python_stub._weir_memory import MemoryReader


@dataclass(slots=True)
class PythonRequest:
    """One request of a batch, as a Python model sees it.

    `flags` are `schemas.requests.SEQUENCE_START` and `SEQUENCE_END`; `timeout_us` is 0 for none; `outputs` are the
    names the caller asked for, empty for all. `trace` is the place in the request's trace as JSON, "" where there is
    none. Tensor data is bytes, a view, or a reference to a shared-memory segment.
    """

    id: str = ""
    correlation_id: int | str = 0
    flags: int = 0
    timeout_us: int = 0
    parameters: Parameters = field(default_factory=dict)
    outputs: Sequence[str] = ()
    inputs: Sequence[Tensor] = ()
    trace: str = ""


@dataclass(slots=True)
class PythonResponse:
    """A model's answer to one request: outputs and response parameters, or an error.

    `raised` tells a failure to run from an error that the model answered. Outputs of more than 64 KiB are read-only
    views: those of what `execute` returned last until the next `execute` of the same process, those of a response that
    was sent until `ResponseSink.respond` returns.
    """

    outputs: list[Tensor] = field(default_factory=list)
    error: WeirError | None = None
    parameters: Parameters | None = None
    raised: bool = False


RESCHEDULED = PythonResponse()
"""In the place of the response to a request that its model wants to be run again."""


class ResponseSink(Protocol):
    """Where the responses of one run go that its model sends itself; called by a thread of the process's own.

    `position` is the request's among those given to `execute`. The model waits until a call has returned.
    """

    def respond(self, position: int, response: PythonResponse | None, is_final: bool) -> None:
        """The model sent a response; None for the end alone."""

    def is_cancelled(self, position: int) -> bool:
        """Whether the request's caller has given up."""

    def fail(self, error: WeirError) -> None:
        """Every request of the run that has no last response yet has failed."""


class NoSink:
    """For who has no use for responses that a model sends itself."""

    def respond(self, position: int, response: PythonResponse | None, is_final: bool) -> None:
        """See `ResponseSink`."""

    def is_cancelled(self, position: int) -> bool:
        """See `ResponseSink`: never."""
        return False

    def fail(self, error: WeirError) -> None:
        """See `ResponseSink`."""


def unpack_response(memory: MemoryReader, first: Any, second: Any) -> PythonResponse:
    """A response as its process packed it, with large outputs in `memory`."""
    if isinstance(first, int):
        return PythonResponse(error=WeirError(ErrorCode.from_number(first), second))
    outputs = [
        Tensor(name, datatype, shape, content if isinstance(content, bytes) else memory.view(*content))
        for name, datatype, shape, content in first
    ]
    return PythonResponse(outputs, None, second)

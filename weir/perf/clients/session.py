"""What the clients of all protocols have in common: `Client`, `Session`, `Answer`, and the errors of calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from weir.perf.load.sequences import SequenceStep
from weir.schemas.core.requests import InferRequest

MAX_ERROR_CHARACTERS = 300


class Unreachable(Exception):
    """The server can't be reached, or has no such model. The message is one line."""


class Denied(Unreachable):
    """The server refuses the request: it wants a key, or the one that it was shown may not do this."""


class CallFailed(Exception):
    """A request that has no answer. The message is the server's, or that of the connection's end.

    `is_connection`: nothing was answered, so the next request should wait a moment.
    """

    def __init__(self, text: str, is_connection: bool = False) -> None:
        super().__init__(" ".join(text.split())[:MAX_ERROR_CHARACTERS])
        self.is_connection = is_connection


class RegionPlace(NamedTuple):
    """Where an input of a request lies in a registered region of shared memory; `offset` and `size` in bytes."""

    region: str
    offset: int
    size: int


class SampleRequest(NamedTuple):
    """A request that is sent many times. `places` are those of its inputs, by name, that lie in shared memory."""

    request: InferRequest
    places: Mapping[str, RegionPlace] = {}

    def at(self, step: SequenceStep) -> SampleRequest:
        """The same as a request of a sequence."""
        request = msgspec.structs.replace(self.request, correlation_id=step.correlation_id, sequence_flags=step.flags)
        return SampleRequest(request, self.places)


class Answer(NamedTuple):
    """When the responses of one request arrived, and when the last message: seconds of `time.perf_counter`.

    A decoupled model may have sent no response: then only the end arrived.
    """

    responses_s: Sequence[float]
    end_s: float


class Session(Protocol):
    """One place for a request in flight: a connection, a stream, or a share of a connection."""

    async def infer(self, sample: int, step: SequenceStep | None) -> Answer:
        """Sends sample number `sample`, as this step of a sequence, and waits for the answer. Raises CallFailed."""

    async def close(self) -> None:
        """Ends what it holds."""


class Client(Protocol):
    """Sends samples over one protocol."""

    def load(self, samples: Sequence[SampleRequest]) -> None:
        """Encodes the samples. Raises ValueError for one that the protocol can't carry."""

    def session(self) -> Session:
        """A new session, which connects when it first sends."""

    async def close(self) -> None:
        """Ends what the sessions share."""

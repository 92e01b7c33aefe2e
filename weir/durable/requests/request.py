"""`DurableRequest`: the state of one message of stream QUEUE, from its delivery until it is recorded and acknowledged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum, auto

import msgspec

from weir.bus.nats.connection import Message
from weir.bus.nats.jetstream import DeliveryInfo
from weir.calls.catalog import ServedModel
from weir.calls.inference.call import Call
from weir.calls.inference.documents import HEADER_LENGTH, BodyFormat, Document, digest_of
from weir.durable.requests.headers import DurableHeaders
from weir.durable.requests.retry_policy import AttemptHistory
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferRequest, Lane
from weir.schemas.wire.terminal import Outcome, TerminalRecord

NO_HEADERS = DurableHeaders()
"""Those of messages without headers."""


class Stage(IntEnum):
    """The stages of a request. Before RUNNING it waits."""

    RECEIVED = auto()
    """Its record is looked up, or its body is parsed; those behind it wait."""
    READ = auto()
    """It waits for earlier requests of the stream, or of its sequence, or for the object that its body is in."""
    PARKED = auto()
    """No worker serves its model, or its version of it."""
    READY = auto()
    """It waits for its turn."""
    BACKING_OFF = auto()
    """An attempt failed; the next one starts later."""
    RUNNING = auto()
    """It is submitted and has no response yet."""
    ENDING = auto()
    """Its outcome is known and is being recorded."""
    ENDED = auto()


OnEnded = Callable[["DurableRequest"], None]


class DurableRequest(msgspec.Struct, eq=False):
    """One request; `of` makes it. `id` is final once `is_named`: it may come from the body, if the message itself has
    none.
    """

    message: Message
    delivery: DeliveryInfo
    lane: Lane
    model: str
    version: str
    on_ended: OnEnded
    """Called when the record is stored and the message is to be acknowledged."""
    ack_subject: str
    id: str
    attempt_history: AttemptHistory
    body: bytes
    """The body of the request: that of the message, or of the object that the message names."""
    size_bytes: int
    """Bytes of the message, as the pull counts them."""
    headers: DurableHeaders = NO_HEADERS
    is_named: bool = False
    has_object: bool = False
    """Whether `body` came from object store `requests`."""
    parts: Sequence[memoryview] | WeirError = ()
    """What a helper process has made of a long `body`, or its error."""
    digest: str = ""
    format: BodyFormat = BodyFormat.JSON
    request: InferRequest | None = None
    served: ServedModel | None = None
    owner: str = ""
    """Whose it is, "" without an access policy."""
    sequence: int | str = 0
    """The sequence in whose queue it is, 0 for none."""
    maybe_started: bool = False
    """Whether an earlier owner may have started it."""
    response_version: str = ""
    """The version of the model that responded."""
    attempt: Call | None = None
    """The attempt that runs."""
    stage: Stage = Stage.RECEIVED
    is_counted: bool = False
    """Whether it counts among the waiting requests of its queue."""
    losses: int = 0
    responses: int = 0
    """Responses before the last one that were published in the current attempt."""
    held_response: tuple[list[tuple[str, str]], bytes] | None = None
    """The latest response, encoded, while it is unknown whether it is the last one."""

    @classmethod
    def of(
        cls, message: Message, delivery: DeliveryInfo, lane: Lane, queue: tuple[str, str], on_ended: OnEnded
    ) -> DurableRequest:
        """The request in a delivered message. `queue` is the model and the version that its subject names."""
        id = f"{delivery.stored_ns:x}-{delivery.sequence}"
        return cls(
            message,
            delivery,
            lane,
            *queue,
            on_ended,
            message.reply,
            id,
            AttemptHistory(id, delivery.stored_ns // 1_000_000),
            message.data,
            len(message.data) + len(message.header_block),
        )

    @property
    def accepted_ms(self) -> int:
        """When the message was stored, in unix milliseconds."""
        return self.delivery.stored_ns // 1_000_000

    def name(self, kserve_id: str) -> None:
        """Makes the id final: that of the message, else `kserve_id` of the body, else a generated one."""
        if not self.is_named:
            self.is_named = True
            self.id = self.headers.id or kserve_id or self.id

    def document(self, served: ServedModel) -> Document:
        """Its body, for a codec."""
        length = self.headers.content_headers.get(HEADER_LENGTH)
        return Document(served, self.model, self.version, self.body, length)

    def body_digest(self) -> str:
        """The digest of the body."""
        if not self.digest:
            self.digest = digest_of(self.body)
        return self.digest

    @property
    def attempts(self) -> int:
        """The attempts that count, including those lost with a worker."""
        return self.attempt_history.attempts + self.losses

    def lost(self, now_ms: int, reason: str) -> None:
        """Notes that a worker or process died with it; the scheduler runs it again."""
        self.losses += 1
        self.attempt_history.add_failure(now_ms, reason)

    def record(self, outcome: Outcome, status: int, ended_ms: int) -> TerminalRecord:
        """Its terminal record, without the version."""
        return TerminalRecord(
            id=self.id,
            model=self.model,
            outcome=outcome,
            version="",
            attempts=self.attempts,
            accepted_ms=self.accepted_ms,
            ended_ms=ended_ms,
            status=status,
            tenant=self.headers.tenant,
            digest=self.body_digest(),
            history=self.attempt_history.history,
        )

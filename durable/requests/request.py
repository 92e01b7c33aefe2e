"""`DurableRequest`: the state of one message of stream QUEUE, from its delivery until it is recorded and acknowledged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum

from bus.nats.connection import Message
from bus.nats.jetstream import DeliveryInfo
from client.catalog import ServedModel
from client.in_flight import PendingRequest
from client.message_bodies import BodyFormat, OffloadedBody, digest_of
from durable.requests.headers import DurableHeaders
from durable.requests.retry_policy import AttemptHistory
from schemas.core.errors import WeirError
from schemas.core.requests import InferRequest, InferResponse, Lane
from schemas.wire.terminal import Outcome, TerminalRecord


class Stage(Enum):
    """The stages of a request."""

    WAITING = "waiting"
    """For its model, its body, earlier requests of its sequence, or its turn."""
    RUNNING = "running"
    """It is submitted and has no response yet."""
    BACKING_OFF = "backing off"
    """An attempt failed; the next one starts later."""
    ENDING = "ending"
    """Its outcome is known and is being recorded."""
    ENDED = "ended"


class DurableRequest:
    """One request. `id` is final once `is_named`: it may come from the body, if the message itself has none."""

    __slots__ = (
        "ack_subject",
        "attempt_history",
        "body",
        "delivery",
        "digest",
        "format",
        "has_object",
        "headers",
        "held_response",
        "id",
        "is_charged",
        "is_counted",
        "is_named",
        "lane",
        "losses",
        "maybe_started",
        "message",
        "model",
        "on_ended",
        "outline",
        "pending",
        "queued_responses",
        "request",
        "response_version",
        "responses",
        "sequence",
        "served",
        "stage",
        "version",
    )

    def __init__(  # noqa: PLR0913 - fixed by its delivery
        self,
        message: Message,
        delivery: DeliveryInfo,
        lane: Lane,
        model: str,
        version: str,
        on_ended: Callable[[DurableRequest], None],
    ) -> None:
        self.message = message
        self.delivery = delivery
        self.ack_subject = message.reply
        self.lane = lane
        self.model = model
        self.version = version
        self.on_ended = on_ended
        """Called when the record is stored and the message is to be acknowledged."""
        self.headers: DurableHeaders = DurableHeaders()
        self.id = f"{delivery.stored_ns:x}-{delivery.sequence}"
        self.is_named = False
        self.attempt_history = AttemptHistory(self.id, delivery.stored_ns // 1_000_000)
        self.body = message.data
        """The body of the request: that of the message, or of the object that the message names."""
        self.has_object = False
        """Whether `body` came from object store `requests`."""
        self.outline: OffloadedBody | None = None
        """A long `body`, once a helper process has parsed it."""
        self.queued_responses: deque[tuple[InferResponse | WeirError | None, bool]] | None = None
        """Responses that arrived while a helper process encodes an earlier one; None while it encodes none."""
        self.digest = ""
        self.format = BodyFormat.JSON
        self.request: InferRequest | None = None
        self.served: ServedModel | None = None
        self.sequence: int | str = 0
        """The sequence in whose queue it is, 0 for none."""
        self.maybe_started = False
        """Whether an earlier owner may have started it."""
        self.response_version = ""
        """The version of the model that responded."""
        self.pending: PendingRequest | None = None
        self.stage = Stage.WAITING
        self.is_charged = False
        """Whether its message is charged to the memory ledger."""
        self.is_counted = False
        """Whether it counts among the waiting requests of its queue."""
        self.losses = 0
        self.responses = 0
        """Responses before the last one that were published in the current attempt."""
        self.held_response: tuple[list[tuple[str, str]], bytes] | None = None
        """The latest response, encoded, while it is unknown whether it is the last one."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the message, as the pull counts them."""
        return len(self.message.data) + len(self.message.header_block)

    @property
    def accepted_ms(self) -> int:
        """When the message was stored, in unix milliseconds."""
        return self.delivery.stored_ns // 1_000_000

    def name(self, kserve_id: str) -> None:
        """Makes the id final: that of the message, else `kserve_id` of the body, else a generated one."""
        if not self.is_named:
            self.is_named = True
            self.id = self.headers.id or kserve_id or self.id

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

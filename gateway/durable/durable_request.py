"""`DurableRequest`: one message of stream QUEUE, from its delivery until it has its record and is acknowledged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum

from bus.connection import Message
from bus.delivered_message import Delivery
from calls.catalog import ServedModel
from calls.pending import Pending
from gateway.durable.bodies import BodyFormat, Outline, digest_of
from gateway.durable.request_terms import DurableTerms
from gateway.durable.retry_policy import MAX_HISTORY, Trials
from schemas.errors import WeirError
from schemas.lanes import Lane
from schemas.requests import InferRequest, InferResponse
from schemas.terminal import Attempt, Outcome, TerminalRecord


class Stage(Enum):
    """How far a request is."""

    WAITING = "waiting"
    """For its model, its body, those of its sequence before it, or its turn."""
    RUNNING = "running"
    """It was submitted and has no answer."""
    BACKING_OFF = "backing off"
    """An attempt came to nothing; it is begun again later."""
    ENDING = "ending"
    """Its end is known and is being recorded."""
    ENDED = "ended"


class DurableRequest:
    """See the module. `id` is final once `is_named`: a KServe id in the body counts where the message itself has none."""

    __slots__ = (
        "ack_subject",
        "answered_by",
        "body",
        "delivery",
        "digest",
        "format",
        "has_object",
        "id",
        "is_charged",
        "is_counted",
        "is_named",
        "lane",
        "losses",
        "maybe_begun",
        "message",
        "model",
        "on_ended",
        "outline",
        "outputs_later",
        "pending",
        "request",
        "responses",
        "sequence",
        "served",
        "stage",
        "terms",
        "trials",
        "unsent",
        "version",
    )

    def __init__(
        self,
        message: Message,
        delivery: Delivery,
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
        """Told when its record is stored, and it is to be acknowledged."""
        self.terms: DurableTerms = DurableTerms()
        self.id = f"{delivery.stored_ns:x}-{delivery.sequence}"
        self.is_named = False
        self.trials = Trials(self.id, delivery.stored_ns // 1_000_000)
        self.body = message.data
        """The request's own body: that of the message, or what the object holds that the message names."""
        self.has_object = False
        """Whether `body` came from object store `requests`."""
        self.outline: Outline | None = None
        """A long `body`, once a helper process has read it."""
        self.outputs_later: deque[tuple[InferResponse | WeirError | None, bool]] | None = None
        """Responses that came while a helper process writes one before them; None while it writes none."""
        self.digest = ""
        self.format = BodyFormat.JSON
        self.request: InferRequest | None = None
        self.served: ServedModel | None = None
        self.sequence: int | str = 0
        """The sequence in whose line it stands, 0 for none."""
        self.maybe_begun = False
        """Whether an owner before may have begun it."""
        self.answered_by = ""
        """The version whose responses came."""
        self.pending: Pending | None = None
        self.stage = Stage.WAITING
        self.is_charged = False
        """Whether its message is charged to the memory ledger."""
        self.is_counted = False
        """Whether it counts among those that wait."""
        self.losses = 0
        self.responses = 0
        """Responses before the last that were published, in the present attempt."""
        self.unsent: tuple[list[tuple[str, str]], bytes] | None = None
        """The latest response, encoded, while it is not known whether it is the last."""

    @property
    def size_bytes(self) -> int:
        """Of the message, as the pull counts it."""
        return len(self.message.data) + len(self.message.header_block)

    @property
    def accepted_ms(self) -> int:
        """When it was stored, in unix milliseconds."""
        return self.delivery.stored_ns // 1_000_000

    def name(self, kserve_id: str) -> None:
        """Settles the id, by what the body says; the message's own goes first."""
        if not self.is_named:
            self.is_named = True
            self.id = self.terms.id or kserve_id or self.id

    def body_digest(self) -> str:
        """What tells its body from others."""
        if not self.digest:
            self.digest = digest_of(self.body)
        return self.digest

    @property
    def attempts(self) -> int:
        """How often it was begun, as far as it counts."""
        return self.trials.attempts + self.losses

    def lost(self, now_ms: int, reason: str) -> None:
        """It was lost with a worker or a process, and is done again by the scheduler."""
        self.losses += 1
        self.trials.history.append(Attempt(now_ms, reason))
        del self.trials.history[:-MAX_HISTORY]

    def record(self, outcome: Outcome, status: int, ended_ms: int) -> TerminalRecord:
        """What is recorded of it."""
        return TerminalRecord(
            id=self.id,
            model=self.model,
            outcome=outcome,
            version="",
            attempts=self.attempts,
            accepted_ms=self.accepted_ms,
            ended_ms=ended_ms,
            status=status,
            tenant=self.terms.tenant,
            digest=self.body_digest(),
            history=self.trials.history,
        )

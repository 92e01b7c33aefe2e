"""`Pending`: a request from its acceptance at a door until its last answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from calls.catalog import ServedModel
from calls.partition_choice import Destination
from calls.payload_store import Freeable, free_all
from calls.response_cache import Question
from calls.stream_order import StreamOrder
from schemas.errors import WeirError
from schemas.messages import Moments, Part
from schemas.requests import InferRequest, InferResponse
from telemetry.trace import Trace

OnAnswer = Callable[[InferResponse | WeirError | None, bool], None]
"""Told of each answer, and whether it is the last: None is no response, but the end of them alone."""

Line = tuple[str, str]
"""The requests of one caller that wait for each other: a model's name and a version."""


class Pending:
    """A request that was submitted and has no answer yet. `line` is where its answers wait for those of earlier requests,
    None where they are given as they come. `question` is there where the response cache may know the answer, and until it
    has said that it doesn't, the request `is_queued` not. `queue` is the one that it goes to, or went to. `reads_content`
    says that whoever asked is about to read outputs, also where he otherwise passes references on. `reruns` counts how
    often its answer was lost on the way here. `has_ended` says that `on_answer` is not called any more.
    """

    __slots__ = (
        "has_ended",
        "is_queued",
        "key",
        "line",
        "model",
        "moments",
        "on_answer",
        "part",
        "question",
        "queue",
        "reads_content",
        "request",
        "reruns",
        "slots",
        "stream",
        "trace",
    )

    def __init__(
        self,
        key: int,
        model: ServedModel,
        request: InferRequest,
        part: Part,
        on_answer: OnAnswer,
        slots: Sequence[Freeable],
        trace: Trace | None,
    ) -> None:
        self.key = key
        self.model = model
        self.request = request
        self.part = part
        self.on_answer = on_answer
        self.queue: Destination = model.queue
        self.slots = slots
        self.stream: StreamOrder | None = None
        self.line: Line | None = None
        self.question: Question | None = None
        self.is_queued = True
        self.reads_content = False
        self.reruns = 0
        self.has_ended = False
        self.trace = trace
        self.moments: Moments | None = None
        """Of the answer that `on_answer` is being told of, where the request wants them."""

    def free_slots(self) -> None:
        """Frees what the request holds (`slots`); called when it has ended, and harmless when called again."""
        slots, self.slots = self.slots, ()
        free_all(slots)

"""What schedulers and gateways publish about single batches and requests while a process observes them.

An observer publishes an `ObserveRequest` on subject `observe.request`, and repeats it before its lease ends. Meanwhile
schedulers publish `BatchReport`s and `BatchEndReport`s, and gateways and `weir durable` publish `TraceReport`s, on
`observed.<observer>`, up to the rates that it asks for. Without a live lease nothing is published. Unix times are by the
clock of the host that took them.
"""

# ruff: noqa: RUF012 - msgspec copies empty defaults for every record.

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, NamedTuple

from msgspec import Meta

from weir.schemas.wire.codec import NonNegative, Record, decode, encode

LEASE_S = 10.0
"""How long an `ObserveRequest` is in force; the observer repeats it before."""

MAX_TRACES_PER_S = 200.0
MAX_BATCHES_PER_S = 500.0

MAX_IDS = 64
"""Request ids that one lease may ask for."""

MAX_ID_LENGTH = 256
"""Characters of a request id; longer ones are cut in reports."""

MAX_REPORTED_REQUESTS = 64
"""Requests of a batch that its report lists; `BatchReport.size` counts all."""

MAX_REPORTED_TIMES = 64

_Name = Annotated[str, Meta(max_length=1024)]
_Id = Annotated[str, Meta(max_length=MAX_ID_LENGTH)]
_Process = Annotated[str, Meta(max_length=256)]
_Time = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class BatchReason(StrEnum):
    """Why a scheduler sent a batch when it did, and with these requests."""

    FULL = "full"
    """It reached the largest batch size."""
    PREFERRED = "preferred"
    """It reached a preferred batch size."""
    DELAY = "delay"
    """Its oldest request had waited for `max_queue_delay_microseconds`."""
    FREE = "free"
    """An instance could take a batch, and nothing asks to wait for more requests."""
    CLOSED = "closed"
    """The next request may not join it: for its shape, its size, or a rule of the model."""
    ALONE = "alone"
    """Its request runs alone: it was lost with a worker before."""
    SINGLE = "single"
    """The model has no dynamic batching: each request is a batch."""
    TOGETHER = "together"
    """Waiting requests travel in one message, and run one by one."""
    SEQUENCE = "sequence"
    """The next requests of its sequences were there, and their instance was free."""


class ObserveRequest(Record, frozen=True):
    """Asks for reports about one model (its identity), or about all (""). A lease of 0 s ends it.

    At most `batches_per_s` batches of each model, and `traces_per_s` requests of each gateway, are reported; requests whose
    ids are in `ids` always are.
    """

    observer: Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9_=-]+\Z")]
    model: _Name = ""
    lease_s: Annotated[float, Meta(ge=0, le=LEASE_S)] = LEASE_S
    traces_per_s: Annotated[float, Meta(ge=0, le=MAX_TRACES_PER_S)] = 0.0
    batches_per_s: Annotated[float, Meta(ge=0, le=MAX_BATCHES_PER_S)] = 0.0
    ids: Annotated[list[_Id], Meta(max_length=MAX_IDS)] = []


class BatchedRequest(NamedTuple):
    """A request of a batch: its caller and key, the name of its lane, its rows, and how long it waited at the scheduler."""

    gateway: _Process
    key: NonNegative
    lane: Annotated[str, Meta(max_length=16)]
    rows: NonNegative
    waited_us: NonNegative


class BatchReport(Record, frozen=True, kw_only=True):
    """A batch that `scheduler` has just sent to an instance.

    `requests` lists the first ones of all `size`, which have `rows` rows together; `padding` rows were added. `dropped`
    batches of the model were not reported since the last report, because of the rate.
    """

    scheduler: _Process
    id: NonNegative
    model: _Name
    version: NonNegative
    worker: _Process
    instance: NonNegative
    sent_us: _Time
    size: NonNegative
    rows: NonNegative
    padding: NonNegative = 0
    reason: BatchReason
    requests: Annotated[list[BatchedRequest], Meta(max_length=MAX_REPORTED_REQUESTS)] = []
    dropped: NonNegative = 0


class BatchEndReport(Record, frozen=True, kw_only=True):
    """The end of a reported batch: how long its instance was busy, and whether all its requests have responses."""

    scheduler: _Process
    id: NonNegative
    ended_us: _Time
    busy_us: NonNegative
    is_answered: bool


class TraceReport(Record, frozen=True, kw_only=True):
    """A request that `gateway` has answered: `times` are (name, unix ns) of the stages of its way, in order of time.

    `id` is the client's request id, "" without one. `protocol` is "http", "grpc", "nats" or "durable". `status` is the
    HTTP status of its error, 200 for success. `batch`, `batch_size` and `instance` are None where the response did not
    come from a batch.
    """

    gateway: _Process
    key: NonNegative
    id: _Id = ""
    model: _Name
    version: NonNegative = 0
    protocol: Annotated[str, Meta(max_length=16)] = ""
    status: NonNegative = 200
    error: Annotated[str, Meta(max_length=400)] = ""
    times: Annotated[list[tuple[Annotated[str, Meta(max_length=64)], _Time]], Meta(max_length=MAX_REPORTED_TIMES)] = []
    scheduler: _Process = ""
    worker: _Process = ""
    batch: NonNegative | None = None
    batch_size: NonNegative | None = None
    instance: NonNegative | None = None


Report = BatchReport | BatchEndReport | TraceReport

_KINDS: dict[str, type[Report]] = {"batch": BatchReport, "batch-end": BatchEndReport, "trace": TraceReport}
_NAMES = {kind: name for name, kind in _KINDS.items()}
MAX_REPORTS = 1024
"""Reports in one message."""

ReportRow = tuple[Annotated[str, Meta(max_length=16)], bytes]
"""A report with the name of its kind, as it is part of a message."""

_Rows = Annotated[list[ReportRow], Meta(max_length=MAX_REPORTS)]


def pack_report(report: Report) -> ReportRow:
    """The report as a part of a message."""
    return _NAMES[type(report)], report.pack()


def pack_reports(rows: list[ReportRow]) -> bytes:
    """The message on `observed.<observer>`, with at most MAX_REPORTS reports."""
    return encode(rows)


def unpack_reports(data: bytes) -> list[Report]:
    """The reports in a message. Raises MalformedMessage. Kinds of a newer release are left out."""
    rows = decode(data, _Rows, "message of reports")
    return [_KINDS[name].unpack(content) for name, content in rows if name in _KINDS]

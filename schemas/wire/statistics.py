"""The replies of workers, schedulers and gateways to a request for their counters (`statistics.query`).

A reply with a wrong type, a negative count or a list beyond its bound is malformed. Durations are nanoseconds unless a name
has another unit.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from weir.schemas.wire.codec import decode, encode

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Reading = Annotated[float, Meta(ge=0, le=1.7976931348623157e308)]
Share = Annotated[float, Meta(ge=0, le=1)]
CountAndNs = Annotated[list[Count], Meta(min_length=2, max_length=2)]
"""How often, and how long in all."""

MAX_BUCKETS = 256
"""Bounds of one histogram, those included that a model's configuration gives."""

MAX_OWNERS = 100
"""Owners of requests in the counters of a queue."""

MAX_NAME_LENGTH = 1024

MAX_BINS = 4096
Bin = Annotated[int, Meta(ge=-1, le=MAX_BINS)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]

MemoryUse = tuple[str, Count, Count]
"""(type, id, bytes)."""

FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
"""Triton's reasons; any other is counted as OTHER."""


class Counters(msgspec.Struct, kw_only=True):
    """Base of all counters. Types are exact, and fields of later releases are ignored."""


class HistogramCounters(Counters, kw_only=True):
    """Observations by bucket: `counts` has one more than there are `bounds` (upper, inclusive, ascending).

    Models may configure bounds below zero, and infinite ones.
    """

    bounds: Annotated[list[float], Meta(max_length=MAX_BUCKETS)] = []
    counts: Annotated[list[Count], Meta(max_length=MAX_BUCKETS + 1)] = msgspec.field(default_factory=lambda: [0])
    sum: Reading = 0.0

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.bounds) + 1:
            raise ValueError("there must be one more count than bounds")


class SummaryCounters(Counters, kw_only=True):
    """A summary of durations: `count` and `sum_us` of all, and a sketch of the recent ones (`telemetry.quantiles`)."""

    count: Count = 0
    sum_us: Count = 0
    bins: Annotated[dict[Bin, Count], Meta(max_length=MAX_BINS)] = {}


METRIC_KINDS = ("counter", "gauge", "histogram")
"""The kinds of metrics that models define."""

Number = float
"""The value of a model's own metric: any number, NaN included."""


class SeriesCounters(Counters, kw_only=True):
    """One series of a model's own metrics: `value` is the sum of a histogram, which has `bounds` and `counts`.

    `changed_s` is when a gauge last changed (unix time). `versions` are the (model, version) that define it, with models
    by their plain names.
    """

    labels: Annotated[dict[str, str], Meta(max_length=256)]
    value: Number
    changed_s: Number = 0.0
    bounds: Annotated[list[Number], Meta(max_length=MAX_BINS)] = []
    counts: Annotated[list[Count], Meta(max_length=MAX_BINS + 1)] = []
    versions: Annotated[list[tuple[Name, Count]], Meta(max_length=1 << 16)] = []

    def __post_init__(self) -> None:
        if self.counts and len(self.counts) != len(self.bounds) + 1:
            raise ValueError("there must be one more count than bounds")


class FamilyCounters(Counters, kw_only=True):
    """A metric that models define, as one worker has it."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*\Z", max_length=1 << 16)]
    description: str
    kind: Literal["counter", "gauge", "histogram"]
    series: Annotated[list[SeriesCounters], Meta(max_length=1 << 16)]


class VersionCounters(Counters, kw_only=True):
    """One loaded version of a model on one worker, by Triton's counting rules (`worker.statistics`).

    `batches` holds, by executed batch size, the executions and the nanoseconds of input, inference and output.
    `responses` holds the response statistics of decoupled models by index and kind. `staged_ns` is the part of the queue
    time that requests spent at their instance. `memory_usage` holds (type, id, bytes). `latency` counts the requests that
    succeeded by the time from their arrival at the scheduler to their response, in the buckets of
    `weir.telemetry.instruments.DurationHistogram`; those that a response cache answered, by the time of the lookup.
    """

    model: Name
    version: Count
    success: CountAndNs
    fail: CountAndNs
    queue: CountAndNs
    compute_input: CountAndNs
    compute_infer: CountAndNs
    compute_output: CountAndNs
    cache_hit: CountAndNs = msgspec.field(default_factory=lambda: [0, 0])
    cache_miss: CountAndNs = msgspec.field(default_factory=lambda: [0, 0])
    staged_ns: Count = 0
    inference_count: Count
    execution_count: Count
    last_inference_ms: Count
    failures: Annotated[dict[str, Count], Meta(max_length=16)]
    batches: Annotated[
        dict[Count, Annotated[list[Count], Meta(min_length=4, max_length=4)]], Meta(max_length=1 << 16)
    ] = {}
    responses: Annotated[dict[Count, dict[str, CountAndNs]], Meta(max_length=1 << 16)] = {}
    memory_usage: Annotated[list[MemoryUse], Meta(max_length=1024)] = []
    first_response_ms: HistogramCounters | None = None
    latency: Annotated[dict[Bin, Count], Meta(max_length=MAX_BINS)] = {}
    summaries: dict[str, SummaryCounters] = {}


class GpuReading(Counters, kw_only=True):
    """The readings of a GPU, None for those it does not report. Energy is in joules since the worker started."""

    utilization: Reading | None = None
    memory_total_bytes: Count | None = None
    memory_used_bytes: Count | None = None
    power_usage_w: Reading | None = None
    power_limit_w: Reading | None = None
    energy_j: Reading | None = None


class HostReading(Counters, kw_only=True):
    """The processors and the memory of a worker's host; `host` is the same for all workers of one host."""

    host: str
    utilization: Reading
    memory_total_bytes: Count
    memory_used_bytes: Count


class ProcessReading(Counters, kw_only=True):
    """What a process uses of its host: processor time since it started, and its memory now. A worker's reading includes the
    processes that run its models.
    """

    cpu_s: Reading
    resident_bytes: Count


class HealthCounters(Counters, kw_only=True):
    """The health of a process: the greatest lag of its event loop in the last 10 s (`weir.runtime.loop_lag`), and the
    unexpected exceptions that it has contained, by site (`weir.runtime.containment`).
    """

    loop_lag_s: Reading = 0.0
    contained_failures: Annotated[dict[Name, Count], Meta(max_length=1024)] = {}


class WorkerLoadCounters(Counters, kw_only=True):
    """The load of a worker: its instances, how many of them hold a batch, and the share of the last seconds in which they
    were busy.
    """

    instances: Count = 0
    busy: Count = 0
    utilization: Share = 0.0


class WorkerCounters(Counters, kw_only=True):
    """The reply of a worker. `gpus` are by UUID; `payload_slots` are those that its instances hold now.

    `payload_bytes` were fetched from other hosts, by transport; `payload_readers_refused` are connections of readers that
    it rejected. `pinned_total_bytes` of host memory may be pinned for its instances on GPUs, and `pinned_used_bytes` are;
    both are 0 without GPUs. `families` are the metrics that its models define. `born_ns` (unix time) is when the process
    started: it distinguishes processes of the same name.
    """

    worker: Name
    born_ns: Count = 0
    models: list[VersionCounters]
    malformed_messages: Count = 0
    payload_slots: Count = 0
    payload_bytes: Annotated[dict[str, Count], Meta(max_length=16)] = {}
    payload_readers_refused: Count = 0
    host: HostReading | None = None
    gpus: Annotated[dict[str, GpuReading], Meta(max_length=1024)] = {}
    pinned_total_bytes: Count = 0
    pinned_used_bytes: Count = 0
    families: Annotated[list[FamilyCounters], Meta(max_length=1 << 16)] = []
    load: WorkerLoadCounters | None = None
    process: ProcessReading | None = None
    health: HealthCounters | None = None


CountsByName = Annotated[dict[Name, Count], Meta(max_length=4096)]
LabelledCounts = Annotated[list[tuple[Name, Name, Count]], Meta(max_length=1 << 16)]
"""Rows of a model, a lane or an outcome, and a count."""


class DispatchCounters(Counters, kw_only=True):
    """The requests that a process submits to models: in flight now, published, and rejected by reason; their frames.

    `fetched_bytes` of tensors came from other hosts, by transport; `refused_readers` could not prove that they may read.
    """

    in_flight: Count = 0
    in_flight_us: Count = 0
    requests: Count = 0
    duplicate_responses: Count = 0
    payload_slots: Count = 0
    malformed_messages: Count = 0
    rejected: CountsByName = {}
    fetched_bytes: CountsByName = {}
    refused_readers: Count = 0
    frame_requests: HistogramCounters = msgspec.field(default_factory=HistogramCounters)
    frame_bytes: HistogramCounters = msgspec.field(default_factory=HistogramCounters)


class LedgerCounters(Counters, kw_only=True):
    """The memory ledger of a process: bytes held and requests refused, by kind, and its peak and limit in bytes."""

    held_bytes: CountsByName = {}
    refused: CountsByName = {}
    peak_bytes: Count = 0
    limit_bytes: Count = 0


class ConnectionCounters(Counters, kw_only=True):
    """The connections of clients to a process: open now, how many there may be, and those that it ended, by reason."""

    open: Count = 0
    limit: Count = 0
    ended: CountsByName = {}


class ConsumerCounters(Counters, kw_only=True):
    """The durable requests that a process has taken from their queues, and what it used for them.

    `accepted` is by model and lane, `ended` by model and outcome, `oldest_ms` (unix time, 0 for none) by model and lane.
    """

    accepted: LabelledCounts = []
    ended: LabelledCounts = []
    oldest_ms: LabelledCounts = []
    retries: CountsByName = {}
    redelivered: CountsByName = {}
    conflicts: CountsByName = {}
    malformed: Count = 0
    owned_models: Count = 0
    dispatch: DispatchCounters = msgspec.field(default_factory=DispatchCounters)
    ledger: LedgerCounters = msgspec.field(default_factory=LedgerCounters)
    process: ProcessReading | None = None
    health: HealthCounters | None = None
    connections: ConnectionCounters = msgspec.field(default_factory=ConnectionCounters)


class GatewayCounters(Counters, kw_only=True):
    """The reply of a gateway with a response cache: its hits and misses. `leaving` as in `SchedulerCounters`.

    `weir durable` replies so too, with what it counts of durable requests in `consumer`, and so do gateways without a
    metrics port of their own. `role` is "durable" or "gateway"; `group` is the name of the `weir durable` process whose
    gateway shows these counters as its own.
    """

    gateway: Name
    role: Literal["durable", "gateway"] = "durable"
    group: Annotated[str, Meta(max_length=1024)] = ""
    born_ns: Count = 0
    models: list[VersionCounters]
    leaving: bool = False
    consumer: ConsumerCounters | None = None


class LaneCounters(Counters, kw_only=True):
    """A lane of a queue now: its requests, and the age of the oldest (0 for an empty lane)."""

    depth: Count
    oldest_us: Count


class QueuedVersionCounters(Counters, kw_only=True):
    """One version at a scheduler: requests that no instance has started, and those that the scheduler failed, by reason.

    `busy` instances hold a batch.
    """

    version: Count
    pending: Count
    busy: Count = 0
    failures: Annotated[dict[str, Count], Meta(max_length=16)] = {}
    failed_ns: Count = 0


class LoadCounters(Counters, kw_only=True):
    """The load of a queue: its instances, the share of the last seconds in which they were busy, the number of workers it
    should have (a fraction where the model has several queues), how long a live request that arrives now will wait, and how
    many requests were rejected, by reason.
    """

    instances: Count = 0
    utilization: Share = 0.0
    desired_workers: Annotated[float, Meta(ge=0, le=1 << 20)] = 0.0
    expected_wait_us: Count = 0
    refused: Annotated[dict[Name, Count], Meta(max_length=16)] = {}


class OwnerCounters(Counters, kw_only=True):
    """What an owner of requests has at a queue: live requests that wait or run, and those refused beyond its limit."""

    owner: Name
    in_flight: Count = 0
    refused: Count = 0


class QueueCounters(Counters, kw_only=True):
    """One model at a scheduler. `batch_requests` counts the batches it sent, by their requests. `load` is None for a model
    that was unloaded. `owners` are those with most requests in flight.
    """

    model: Name
    lanes: Annotated[dict[Name, LaneCounters], Meta(max_length=64)]
    versions: list[QueuedVersionCounters]
    redelivered_frames: Count = 0
    retried_batches: Count = 0
    batch_requests: HistogramCounters = msgspec.field(default_factory=HistogramCounters)
    load: LoadCounters | None = None
    owners: Annotated[list[OwnerCounters], Meta(max_length=MAX_OWNERS)] = []


class SchedulerCounters(Counters, kw_only=True):
    """The reply of a scheduler. `leaving`: this is its last reply. `born_ns` as in `WorkerCounters`."""

    scheduler: Name
    born_ns: Count = 0
    models: list[QueueCounters]
    malformed_messages: Count = 0
    leaving: bool = False
    process: ProcessReading | None = None
    health: HealthCounters | None = None


class _Sender(msgspec.Struct):
    """The fields that only replies of one role have."""

    worker: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    gateway: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def pack_counters(counters: dict[str, Any]) -> bytes:
    """A reply, from a dictionary in the form of the classes above."""
    return encode(counters)


def unpack_counters(data: bytes) -> WorkerCounters | SchedulerCounters | GatewayCounters:
    """The reply in a message. Raises MalformedMessage."""
    sender: _Sender = decode(data, _Sender, "reply with counters")
    kind: type[WorkerCounters | SchedulerCounters | GatewayCounters] = SchedulerCounters
    if sender.worker is not msgspec.UNSET:
        kind = WorkerCounters
    elif sender.gateway is not msgspec.UNSET:
        kind = GatewayCounters
    counters: WorkerCounters | SchedulerCounters | GatewayCounters = decode(data, kind, kind.__name__)
    return counters

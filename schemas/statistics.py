"""What workers, schedulers and gateways tell when they are asked for their counters (`statistics.query`).

Checked when it comes, for anybody may publish: a message with a wrong type, a negative count or an endless list is none.
Durations are nanoseconds unless a name says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from schemas.wire import MalformedMessage

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Reading = Annotated[float, Field(ge=0, allow_inf_nan=False)]
CountAndNs = Annotated[list[Count], Field(min_length=2, max_length=2)]
"""How often, and how long in all."""

MAX_BINS = 4096
Bin = Annotated[int, Field(ge=-1, le=MAX_BINS)]
Name = Annotated[str, Field(min_length=1, max_length=1024)]

MemoryUse = Annotated[tuple[str, Count, Count], Field(strict=False)]
"""(type, id, bytes); msgpack knows no tuples."""

FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
"""Triton's reasons; one that is none of them is counted as OTHER."""


class Counters(BaseModel):
    """Base of all: exact types, and fields of a later release are passed over."""

    model_config = ConfigDict(strict=True, extra="ignore", defer_build=True)


class HistogramCounters(Counters):
    """Observations by bucket: `counts` has one more than there are `bounds` (upper, inclusive, ascending)."""

    bounds: Annotated[list[Reading], Field(max_length=256)] = []
    counts: Annotated[list[Count], Field(max_length=257)] = [0]
    sum: Reading = 0.0

    @model_validator(mode="after")
    def _has_a_count_for_each_bucket(self) -> HistogramCounters:
        if len(self.counts) != len(self.bounds) + 1:
            raise ValueError("there must be one more count than bounds")
        return self


class SummaryCounters(Counters):
    """A summary of durations: `count` and `sum_us` of all, and a sketch of the recent ones (`telemetry.quantiles`)."""

    count: Count = 0
    sum_us: Count = 0
    bins: Annotated[dict[Bin, Count], Field(max_length=MAX_BINS)] = {}


METRIC_KINDS = ("counter", "gauge", "histogram")
"""What a model's own metrics are."""

Number = Annotated[float, Field(strict=False)]
"""What a model may have counted: anything that is a number, none at all too."""


class SeriesCounters(Counters):
    """One series of a model's own metrics: `value` is the sum of a histogram, which has `bounds` and `counts`.

    `changed_s` is when a gauge was changed last (unix time). `versions` are the (model, version) that have it; models
    by their plain names.
    """

    labels: Annotated[dict[str, str], Field(max_length=256)]
    value: Number
    changed_s: Number = 0.0
    bounds: Annotated[list[Number], Field(max_length=MAX_BINS)] = []
    counts: Annotated[list[Count], Field(max_length=MAX_BINS + 1)] = []
    versions: Annotated[list[Annotated[tuple[Name, Count], Field(strict=False)]], Field(max_length=1 << 16)] = []

    @model_validator(mode="after")
    def _has_a_count_for_each_bucket(self) -> SeriesCounters:
        if self.counts and len(self.counts) != len(self.bounds) + 1:
            raise ValueError("there must be one more count than bounds")
        return self


class FamilyCounters(Counters):
    """A metric that models make themselves, as one worker has it."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*$", max_length=1 << 16)]
    description: str
    kind: Literal["counter", "gauge", "histogram"]
    series: Annotated[list[SeriesCounters], Field(max_length=1 << 16)]


class VersionCounters(Counters):
    """One loaded version of a model on one worker, by Triton's counting rules (`worker.statistics`).

    `batches` holds, by executed batch size, the executions and the nanoseconds of input, inference and output.
    `responses` holds the response statistics of decoupled models by index and kind. `staged_ns` is the part of the queue
    time that requests spent at their instance. `memory_usage` holds (type, id, bytes).
    """

    model: Name
    version: Count
    success: CountAndNs
    fail: CountAndNs
    queue: CountAndNs
    compute_input: CountAndNs
    compute_infer: CountAndNs
    compute_output: CountAndNs
    cache_hit: CountAndNs = [0, 0]
    cache_miss: CountAndNs = [0, 0]
    staged_ns: Count = 0
    inference_count: Count
    execution_count: Count
    last_inference_ms: Count
    failures: Annotated[dict[str, Count], Field(max_length=16)]
    batches: Annotated[
        dict[Count, Annotated[list[Count], Field(min_length=4, max_length=4)]], Field(max_length=1 << 16)
    ] = {}
    responses: Annotated[dict[Count, dict[str, CountAndNs]], Field(max_length=1 << 16)] = {}
    memory_usage: Annotated[list[MemoryUse], Field(max_length=1024)] = []
    first_response_ms: HistogramCounters | None = None
    summaries: dict[str, SummaryCounters] = {}


class GpuReading(Counters):
    """What a GPU says of itself; None for what it does not tell. Energy in joules since the worker started."""

    utilization: Reading | None = None
    memory_total_bytes: Count | None = None
    memory_used_bytes: Count | None = None
    power_usage_w: Reading | None = None
    power_limit_w: Reading | None = None
    energy_j: Reading | None = None


class HostReading(Counters):
    """The processors and the memory of a worker's host; `host` is the same for all workers of one host."""

    host: str
    utilization: Reading
    memory_total_bytes: Count
    memory_used_bytes: Count


class ProcessReading(Counters):
    """What a process has taken of its host: processor time since it started, and the memory that it has now; a worker's
    with those that run its models.
    """

    cpu_s: Reading
    resident_bytes: Count


class HealthCounters(Counters):
    """A process's own condition: the greatest lag of its event loop in the last 10 s (`runtime.loop_lag`), and the
    unexpected exceptions that it has contained, by site (`runtime.containment`).
    """

    loop_lag_s: Reading = 0.0
    contained_failures: Annotated[dict[Name, Count], Field(max_length=1024)] = {}


class WorkerLoadCounters(Counters):
    """How a worker is loaded: its instances, how many of them hold a batch, and the share of the last seconds in which they
    were busy.
    """

    instances: Count = 0
    busy: Count = 0
    utilization: Annotated[Reading, Field(le=1)] = 0.0


class WorkerCounters(Counters):
    """The answer of a worker; `gpus` by UUID, `payload_slots` are those its instances hold now.

    `payload_bytes` were fetched from other hosts, by the way on which they came; `payload_readers_refused` are connections
    by which others tried in vain to fetch from it.
    `pinned_total_bytes` of host memory may be pinned for its instances on GPUs, and `pinned_used_bytes` are; 0 without any.
    `families` are the metrics that its models make themselves.

    `born_ns` (unix time) tells it from an earlier one of its name.
    """

    worker: Name
    born_ns: Count = 0
    models: list[VersionCounters]
    malformed_messages: Count = 0
    payload_slots: Count = 0
    payload_bytes: Annotated[dict[str, Count], Field(max_length=16)] = {}
    payload_readers_refused: Count = 0
    host: HostReading | None = None
    gpus: Annotated[dict[str, GpuReading], Field(max_length=1024)] = {}
    pinned_total_bytes: Count = 0
    pinned_used_bytes: Count = 0
    families: Annotated[list[FamilyCounters], Field(max_length=1 << 16)] = []
    load: WorkerLoadCounters | None = None
    process: ProcessReading | None = None
    health: HealthCounters | None = None


class GatewayCounters(Counters):
    """The answer of a gateway with a response cache: its hits and misses. `leaving` as in `SchedulerCounters`."""

    gateway: Name
    born_ns: Count = 0
    models: list[VersionCounters]
    leaving: bool = False


class LaneCounters(Counters):
    """A queue as it stands now: requests, and the age of the oldest (0: there is none)."""

    depth: Count
    oldest_us: Count


class QueuedVersionCounters(Counters):
    """One version at a scheduler: requests that no instance has begun, and those it failed itself, by reason.

    `busy` instances hold a batch.
    """

    version: Count
    pending: Count
    busy: Count = 0
    failures: Annotated[dict[str, Count], Field(max_length=16)] = {}
    failed_ns: Count = 0


class LoadCounters(Counters):
    """How a queue is loaded: its instances, the share of the last seconds in which they were busy, workers it should have
    (in fractions, where the model has several queues), how long a live request that comes now will wait, and how many
    requests were refused, by reason.
    """

    instances: Count = 0
    utilization: Annotated[Reading, Field(le=1)] = 0.0
    desired_workers: Annotated[Reading, Field(le=1 << 20)] = 0.0
    expected_wait_us: Count = 0
    refused: Annotated[dict[Name, Count], Field(max_length=16)] = {}


class QueueCounters(Counters):
    """One model at a scheduler. `batch_requests` are the batches it sent, by their requests. `load` is None of one that has
    gone.
    """

    model: Name
    lanes: Annotated[dict[Name, LaneCounters], Field(max_length=64)]
    versions: list[QueuedVersionCounters]
    redelivered_frames: Count = 0
    redone_batches: Count = 0
    batch_requests: HistogramCounters = HistogramCounters()
    load: LoadCounters | None = None


class SchedulerCounters(Counters):
    """The answer of a scheduler; `leaving`: it is the last one of it. `born_ns` as in `WorkerCounters`."""

    scheduler: Name
    born_ns: Count = 0
    models: list[QueueCounters]
    malformed_messages: Count = 0
    leaving: bool = False
    process: ProcessReading | None = None
    health: HealthCounters | None = None


def pack_counters(counters: dict[str, Any]) -> bytes:
    """An answer, given in the form of the classes above."""
    return bytes(msgpack.packb(counters))


def unpack_counters(data: bytes) -> WorkerCounters | SchedulerCounters | GatewayCounters:
    """The answer in a message. Raises MalformedMessage."""
    try:
        fields = msgpack.unpackb(data, strict_map_key=False)
        if not isinstance(fields, dict):
            raise MalformedMessage("not counters: no map")
        if "worker" in fields:
            return WorkerCounters.model_validate(fields)
        return (GatewayCounters if "gateway" in fields else SchedulerCounters).model_validate(fields)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"][:6]))
        raise MalformedMessage(f"not counters: {place[:200]}: {problem['msg'][:200]}") from error
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not counters: {error}") from error

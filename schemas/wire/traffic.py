"""Messages about traffic: the record of a model's traffic rule, and the counters of requests by version."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from weir.schemas.config.traffic import MAX_ARMS, TrafficRule
from weir.schemas.wire.codec import Message, NonNegative, Record

MAX_ROWS = 10_000
"""Rows of one report."""


RUNNING, DONE, ABORTED = "running", "done", "aborted"
"""The states of a ramp."""


class RampState(msgspec.Struct, frozen=True):
    """A ramp of the share of `version` to `goal` (of 1) within `over_s`, from the weights `before`.

    `number` distinguishes the ramps of a model. `step` is the number of its step (`weir.calls.traffic.ramp`), `abort_if`
    its conditions, `reason` why it went back.
    """

    number: int
    version: int
    goal: float
    over_s: float
    before: Annotated[dict[int, float], Meta(max_length=MAX_ARMS)]
    abort_if: str = ""
    step: int = 0
    state: str = RUNNING
    reason: str = ""

    @property
    def is_running(self) -> bool:
        """Whether a process is to go on with it."""
        return self.state == RUNNING

    def changed(self, step: int, state: str, reason: str) -> RampState:
        """The ramp at another step, or in another state."""
        return msgspec.structs.replace(self, step=step, state=state, reason=reason)


class ShadowRule(msgspec.Struct, frozen=True):
    """Copies of this share (of 1) of a model's requests run on `version`.

    With `compares` their outputs are compared with those of the live requests; otherwise they are dropped.
    """

    version: int
    share: float
    compares: bool = False


class TrafficRecord(Record, frozen=True):
    """What an operator has set for the traffic of one model. It takes precedence over the model's configuration.

    `revision` grows with each change of the model's record; `changed_ms` is unix time, `by` who asked for the change.
    """

    model: str
    revision: NonNegative
    weights: Annotated[dict[int, float], Meta(max_length=MAX_ARMS)] = msgspec.field(default_factory=dict)
    sticky: str = ""
    changed_ms: int = 0
    by: str = ""
    ramp: RampState | None = None
    shadow: ShadowRule | None = None

    @property
    def rule(self) -> TrafficRule | None:
        """The rule of the record, None without weights. Raises ValueError for an invalid one."""
        return TrafficRule(self.weights, self.sticky) if self.weights else None


class ArmRow(NamedTuple):
    """The requests of a model's version that ended: how they got the version, how many, how many failed, how long they
    took together, and the bins of a `DurationSketch` of those that succeeded.
    """

    model: str
    version: int
    arm: str
    requests: NonNegative
    failures: NonNegative
    duration_us: NonNegative
    bins: dict[int, NonNegative]


class OutputRow(NamedTuple):
    """How an output of copies differs (`weir.calls.traffic.comparison`): values and labels that were compared and that
    differ, and the largest differences.
    """

    values: NonNegative
    differing: NonNegative
    largest_absolute: float
    largest_relative: float
    labels: NonNegative
    different_labels: NonNegative


class ComparisonRow(NamedTuple):
    """The comparisons of live requests with their copies on a version
    (`weir.calls.traffic.comparison.ComparisonTotals`).
    """

    model: str
    version: int
    compared: NonNegative
    skipped: NonNegative
    failed: NonNegative
    mismatched: NonNegative
    differing: NonNegative
    outputs: dict[str, OutputRow]


class SampleTensor(NamedTuple):
    """A tensor of a sample, with its content as in `weir.schemas.core.tensors.Tensor`."""

    name: str
    datatype: str
    shape: list[NonNegative]
    data: bytes


class ShadowSample(Record, frozen=True):
    """A request, its response and that of its copy. Inputs whose content lay in shared memory are left out."""

    request_id: str
    at_ms: NonNegative
    inputs: list[SampleTensor]
    live: list[SampleTensor]
    copied: list[SampleTensor]


class TrafficReport(Message, frozen=True):
    """The counters of one process since it started."""

    process: str
    rows: Annotated[list[ArmRow], Meta(max_length=MAX_ROWS)]
    comparisons: Annotated[list[ComparisonRow], Meta(max_length=MAX_ROWS)] = msgspec.field(default_factory=list)

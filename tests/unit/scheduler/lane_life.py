"""What must hold of lanes in a model's life, whatever happens; part of `model_simulation.Simulation`."""

from __future__ import annotations

from queue_oracle import QueueOracle

from scheduler.batch import Batch
from scheduler.lanes import BATCH, LIVE
from scheduler.leeway import LONGEST_QUIET_US, RECENT_US
from scheduler.queued_request import QueuedRequest
from schemas.model_config import ModelConfig


class LaneLife:
    """See the module. `riders_sent` counts requests that went in batches of earlier lanes."""

    now_us: int
    wake_at_us: int | None
    rules: QueueOracle
    configs: dict[int, ModelConfig]

    def __init__(self) -> None:
        super().__init__()
        self.riders_sent = 0
        self.live_us: dict[int, int] = {}  # when a live request came last, by the version that took it in

    def _came(self, requests: list[QueuedRequest]) -> None:
        for request in requests:
            version = _version_of(request)
            if version is not None and request.lane == LIVE:
                self.live_us[version] = self.now_us

    def _check_lanes(self, batch: Batch, waiting: list[QueuedRequest]) -> None:
        """The batch is of one lane, with riders of later ones; `waiting` are those at its version that it leaves there."""
        lanes = [request.lane for request in batch.requests]
        assert lanes == sorted(lanes)
        assert not [r for r in waiting if r.lane < lanes[0]], "runs while one of an earlier lane waits"
        assert batch.is_alone == (lanes[0] == BATCH)
        self.riders_sent += sum(lane != lanes[0] for lane in lanes)
        if lanes[0] != lanes[-1]:
            assert self.configs[batch.version].dynamic_batching is not None
        for lane in {*lanes}:
            turns = [self._turn(r, batch.version) for r in batch.requests if r.lane == lane]
            assert turns == sorted(turns)
            assert not [r for r in waiting if r.lane == lane and self._turn(r, batch.version) < turns[-1]], (
                "one that should have run before waits"
            )

    def _check_idle(self, version: int, waiting: list[QueuedRequest]) -> None:
        """An instance is idle: the first lane of which somebody waits waits for no longer than its delay, or for quiet."""
        lane = min(request.lane for request in waiting)
        if any(request.lane < lane and _version_of(request) == version for request in self._waiting()):
            return  # those for the latest version and those for this one by its number wait together
        first_us = min(request.enqueued_us for request in waiting if request.lane == lane)
        assert self.wake_at_us is not None, "an instance is idle and a request waits"
        live_us = self.live_us.get(version, 0)
        dynamic = self.configs[version].dynamic_batching
        delay_us = dynamic.max_queue_delay_microseconds if dynamic is not None else 0
        if lane == BATCH and live_us and self.now_us - live_us < RECENT_US:
            due_us = max(live_us + LONGEST_QUIET_US, first_us + delay_us)
        else:
            assert delay_us, "an instance is idle and a request waits"
            due_us = first_us + delay_us
        assert self.now_us < due_us
        assert self.wake_at_us <= due_us

    def _turn(self, request: QueuedRequest, version: int) -> tuple[int, ...]:
        return self.rules.turn(request, version, self.now_us)


def _version_of(request: QueuedRequest) -> int | None:
    """The version at which it waits; None for those that wait for a version."""
    version: int | None = getattr(request.place, "version", None)
    return version

"""What may happen to series in a model's life, and what must hold of each; part of `model_simulation.Simulation`."""

from __future__ import annotations

from collections import defaultdict

from scheduler.batch import Batch
from scheduler.model_scheduler import ModelScheduler
from scheduler.placement import SLOTS
from scheduler.queued_request import QueuedRequest
from scheduler.series import MAX_SERIES_REQUESTS
from scheduler.version_scheduler import Ended
from schemas.messages import BatchOutcome
from schemas.model_config import ModelConfig


class SeriesLife:
    """See the module. `series_sent` counts them."""

    model: ModelScheduler
    now_us: int
    batches: dict[int, Batch]
    configs: dict[int, ModelConfig]
    instances: dict[str, dict[int, int]]

    def __init__(self) -> None:
        self.handed_back: dict[int, list[QueuedRequest]] = defaultdict(list)  # by the ids of batches
        self.series_sent = 0

    def hand_back(self, number: int, positions: list[int]) -> None:
        """Some of a series have not begun, and are to run elsewhere; said of what is none, or twice, it changes nothing."""
        if self.batches:
            batch = list(self.batches.values())[number % len(self.batches)]
            back = [r for at, r in enumerate(batch.requests) if at in positions and r in self._members(batch)]
            ended = self.model.complete(self.now_us, batch.id, BatchOutcome.HANDED_BACK, 0, positions)
            if not batch.is_series:
                assert not any(ended)
                return
            assert not ended[1]
            assert list(ended[0]) == [request for request in back if request.cancelled]
            assert not any(request.attempts for request in back), "nobody is to blame"
            self.handed_back[batch.id] += back
            self._ended(ended)

    def end_in_part(self, number: int, outcome: int, positions: list[int]) -> None:
        """A series ends, but for those at these positions, which were lost or handed back."""
        series = [batch for batch in self.batches.values() if batch.is_series]
        if series:
            batch = series[number % len(series)]
            members, attempts = self._members(batch), {r: r.attempts for r in batch.requests}
            del self.batches[batch.id]
            answered, failures = self.model.complete(self.now_us, batch.id, outcome, 5, positions)
            others = [r for at, r in enumerate(batch.requests) if at not in positions and r in members]
            assert list(answered)[: len(others)] == others
            lost = [r for r in members if r not in others]
            assert {r for r in lost if r.cancelled} == set(answered) - set(others)
            is_blamed = outcome == BatchOutcome.UNANSWERED
            assert all(r.attempts == attempts[r] + is_blamed for r in lost if not r.cancelled)
            self._ended((answered, failures), batch.id)

    def _members(self, batch: Batch) -> list[QueuedRequest]:
        return [request for request in batch.requests if request not in self.handed_back[batch.id]]

    def _check_series(self, batch: Batch, unsent: list[Batch]) -> None:
        """It takes nothing that another instance could begin with; `unsent` are the batches from it on."""
        size = len(batch.requests)
        assert batch.is_series == (size > 1)
        if size == 1:
            return
        self.series_sent += 1
        assert not self.configs[batch.version].is_decoupled
        assert size <= MAX_SERIES_REQUESTS
        assert not any(r.attempts for r in batch.requests)
        held = [b for b in self._holding() if b.version == batch.version and self._is_present(b)]
        # Nobody waits behind a request that may be what kills workers.
        taken = sum(SLOTS if b.requests[0].runs_alone else 1 for b in held)
        places = SLOTS * sum(counts.get(batch.version, 0) for counts in self.instances.values()) - taken
        gone = {r for b in unsent for r in b.requests}
        waiting = len(gone) + sum(
            r not in gone and getattr(r.place, "version", None) == batch.version for r in self._waiting()
        )
        assert size <= -(-waiting // places)

    def _is_present(self, batch: Batch) -> bool:
        return batch.instance.number < self.instances[batch.instance.worker].get(batch.version, 0)

    def _ended(self, ended: Ended, batch_id: int = 0) -> None:
        raise NotImplementedError

    def _holding(self) -> list[Batch]:
        raise NotImplementedError

    def _waiting(self) -> list[QueuedRequest]:
        raise NotImplementedError

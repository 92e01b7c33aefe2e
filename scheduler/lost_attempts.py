"""`LostAttempts`: tells gateways which of their durable requests were lost with what ran them, and are done again.

The policy says who is done again and who is given up; it does not say it of each. So its requests are looked at before and
after: those that were lost once more and wait again. Losses are rare, and batches that end well come by here not at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection

from bus import durable_subjects as subjects
from scheduler.model_scheduler import ModelScheduler
from scheduler.queued_request import QueuedRequest
from scheduler.version_scheduler import Ended
from schemas.lost_attempts import pack_lost_attempts
from schemas.messages import NOBODY


class LostAttempts:
    """Of one model; `publish` sends a message on a subject."""

    def __init__(self, scheduler: ModelScheduler, publish: Callable[[str, bytes], None]) -> None:
        self._scheduler = scheduler
        self._publish = publish

    def told(self, batch_ids: Collection[int], reason: str, lose: Callable[[], Ended]) -> Ended:
        """Calls `lose`, which tells the policy that these batches are lost, and tells gateways what comes of it."""
        before = [(request, request.attempts) for request in self._durable_in(batch_ids)]
        ended = lose()
        by_gateway: defaultdict[str, list[int]] = defaultdict(list)
        for request, attempts in before:
            if request.attempts > attempts and not request.is_sent:
                by_gateway[request.gateway].append(request.key)
        for gateway, keys in by_gateway.items():
            self._publish(subjects.lost_attempts(gateway), pack_lost_attempts(keys, reason))
        return ended

    def _durable_in(self, batch_ids: Collection[int]) -> list[QueuedRequest]:
        found = (version.batch(id) for version in self._scheduler.versions().values() for id in batch_ids)
        batches = (batch for batch in found if batch is not None)
        return [
            request for batch in batches for request in batch.requests if request.lane and request.gateway != NOBODY
        ]

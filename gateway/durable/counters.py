"""`DurableCounters`: what a gateway counts of durable requests, for its metrics.

Each count is by model. Producers may name any model, so names that are not served share one row, and so do those beyond
`MAX_MODELS`: the number of series stays bounded whatever is published.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection

from schemas.lanes import Lane
from schemas.terminal import Outcome

MAX_MODELS = 1000
"""Models with counters of their own; those beyond are counted together."""

OTHER_MODELS = "_other"
"""The name under which they are."""

_LANE_NAMES = {lane: lane.name.lower() for lane in Lane}


class DurableCounters:
    """See the module. Everything only counts up but `waiting` and `in_flight`, which `Backlog` sets as the broker tells
    them.

    `is_known` tells whether a model is one that the gateway may have: without it each name is.
    """

    def __init__(self, is_known: Callable[[str], bool] | None = None) -> None:
        self._is_known = is_known
        self._models: set[str] = set()
        self.accepted: defaultdict[tuple[str, str], int] = defaultdict(int)
        """By model and lane: requests taken from the stream for the first time."""
        self.ended: defaultdict[tuple[str, str], int] = defaultdict(int)
        """By model and outcome: terminal records that this gateway has stored."""
        self.retries: defaultdict[str, int] = defaultdict(int)
        """Requests begun again after an attempt that came to nothing."""
        self.redelivered: defaultdict[str, int] = defaultdict(int)
        """Messages that the broker delivered not for the first time."""
        self.conflicts: defaultdict[str, int] = defaultdict(int)
        """Requests whose id had a terminal record already: of the same request, or of another."""
        self.malformed = 0
        """Messages that are no requests."""
        self.waiting: dict[tuple[str, str], int] = {}
        """By model and lane: requests in the stream that no gateway has pulled."""
        self.in_flight: dict[tuple[str, str], int] = {}
        """By model and lane: requests that their owner has pulled and that have no terminal record yet."""
        self.oldest_ms: dict[tuple[str, str], int] = {}
        """By model and lane, of models this gateway owns: when the oldest of them was accepted, in unix milliseconds."""

    def accept(self, model: str, lane: Lane) -> None:
        """A request was taken from the stream for the first time."""
        self.accepted[self.name_of(model), lane_name(lane)] += 1

    def end(self, model: str, outcome: Outcome) -> None:
        """A terminal record was stored."""
        self.ended[self.name_of(model), outcome.value] += 1

    def retry(self, model: str) -> None:
        """A request is begun again."""
        self.retries[self.name_of(model)] += 1

    def redeliver(self, model: str) -> None:
        """A message came not for the first time."""
        self.redelivered[self.name_of(model)] += 1

    def conflict(self, model: str) -> None:
        """The id had a terminal record."""
        self.conflicts[self.name_of(model)] += 1

    def set_waiting(self, model: str, lane: Lane, count: int) -> None:
        """So many are in the stream."""
        self._set(self.waiting, model, lane, count)

    def set_in_flight(self, model: str, lane: Lane, count: int) -> None:
        """So many were pulled and have no record."""
        self._set(self.in_flight, model, lane, count)

    def set_oldest(self, model: str, lane: Lane, accepted_ms: int) -> None:
        """The oldest request of the queue that this gateway owns was accepted at this time; 0 where there is none."""
        self._set(self.oldest_ms, model, lane, accepted_ms)

    def forget(self, model: str) -> None:
        """The model has gone to another gateway, which tells its gauges from now on."""
        for gauge in (self.waiting, self.in_flight, self.oldest_ms):
            for key in [key for key in gauge if key[0] == model]:
                del gauge[key]

    def keep_only(self, queues: Collection[tuple[str, Lane]]) -> None:
        """These queues are all there are: others have no gauges any more."""
        kept = {(model, lane_name(lane)) for model, lane in queues}
        for gauge in (self.waiting, self.in_flight):
            for key in gauge.keys() - kept:
                del gauge[key]

    def name_of(self, model: str) -> str:
        """The name under which `model` is counted."""
        if model in self._models:
            return model
        if len(self._models) >= MAX_MODELS or (self._is_known is not None and not self._is_known(model)):
            return OTHER_MODELS
        self._models.add(model)
        return model

    def _set(self, gauge: dict[tuple[str, str], int], model: str, lane: Lane, value: int) -> None:
        name = self.name_of(model)
        if name != OTHER_MODELS:  # of several models a gauge would tell the last one's
            gauge[name, lane_name(lane)] = value


def lane_name(lane: Lane) -> str:
    """The label of a lane: "live", "event" or "batch"."""
    return _LANE_NAMES[lane]

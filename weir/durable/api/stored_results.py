"""`StoredResults`: how many requests with an id are stored for each owner: those that wait, and results that are kept.

An id tells whose it is (`AsyncRequestIds`), and the streams have one subject for each id, so their lists of subjects are
the count: it can't drift, whoever deletes a result and whenever one expires. The lists are read at most each `MAX_AGE_S`,
and for at most a tenth of the time: where a million results are stored that is each few seconds. Requests that this gateway
has stored since then are added; those of other gateways are known after the next reading.
Measured with nats-server 2.15: see docs/security.md.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol

from weir.bus.naming import durable_subjects as subjects
from weir.bus.nats.connection import BROKER_ERRORS
from weir.durable.api.errors import broker_unavailable
from weir.schemas.core.errors import WeirError

MAX_AGE_S = 0.5
"""How old the lists of subjects may be."""

REST = 9.0
"""How many times as long as they took to read the lists are left alone."""


class ListsSubjects(Protocol):
    """What is needed of `JetStream`."""

    async def subject_counts(self, stream: str, filter: str) -> dict[str, int]:
        """The number of messages on each subject that `filter` matches."""


class ResultsLimit(NamedTuple):
    """How many requests and results of `owner` may be stored, and the error for more."""

    owner: str
    limit: int
    refusal: Callable[[], WeirError]


class StoredResults:
    """Counts for one gateway. `group_of` tells the group of an id, `group` that of an owner ("" where there is none)."""

    def __init__(
        self,
        messages: ListsSubjects,
        group: Callable[[str], str],
        group_of: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._messages = messages
        self._group = group
        self._group_of = group_of
        self._clock = clock
        self._read: Counter[str] = Counter()
        self._added: Counter[str] = Counter()  # stored since the lists began to be read
        self._storing: Counter[str] = Counter()
        self._valid_until_s = float("-inf")
        self._reading = asyncio.Lock()

    @asynccontextmanager
    async def room(self, asked: ResultsLimit | None) -> AsyncIterator[None]:
        """While a request is stored. Raises the error of `asked` if no more may be stored, 503 without a broker."""
        if asked is None:
            yield
            return
        group = self._group(asked.owner)
        await self._read_again()
        if self._read[group] + self._added[group] + self._storing[group] >= asked.limit:
            raise asked.refusal()
        self._storing[group] += 1
        try:
            yield
            self._added[group] += 1
        finally:
            self._storing[group] -= 1

    async def _read_again(self) -> None:
        async with self._reading:
            since_s = self._clock()
            if since_s < self._valid_until_s:
                return
            added_before, self._added = self._added, Counter()
            try:
                waiting = await self._messages.subject_counts(subjects.QUEUE_STREAM, subjects.ANY_JOB)
                kept = await self._messages.subject_counts(subjects.RESULT_STREAM, subjects.ANY_RESULT)
            except BROKER_ERRORS:
                self._added += added_before
                raise broker_unavailable() from None
            self._read = Counter(map(self._group_of, _ids(waiting, kept)))
            now_s = self._clock()
            self._valid_until_s = now_s + max(MAX_AGE_S, REST * (now_s - since_s))


def _ids(waiting: Iterable[str], kept: Iterable[str]) -> set[str]:
    """The ids in the subjects: a request that has just ended is in both streams."""
    return {subject.split(".", 4)[3] for subject in waiting} | {subject.rpartition(".")[2] for subject in kept}

"""`RepositoryReport`: tells gateways which models this worker sees in its repositories, loaded or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bus import subjects
from bus.connection import Bus, Message
from bus.reserved_subjects import may_answer
from repository.layout import ModelRepository
from runtime.containment import contained
from schemas.repository_view import RepositoryView, pack_repository_view


class RepositoryReport:
    """Answers repository queries. Looking takes a thread, and one look answers all queries that came before it.

    `unfetched()` tells of models that lie in a repository in NATS and can't be fetched from it: the reason, by model.
    """

    def __init__(
        self,
        bus: Bus,
        worker_id: str,
        repository: ModelRepository,
        background: asyncio.TaskGroup,
        unfetched: Callable[[], dict[str, str]],
    ) -> None:
        self._unfetched = unfetched
        self._bus = bus
        self._worker = worker_id
        self._repository = repository
        self._background = background
        self._asked: set[str] = set()
        self._looking = False

    async def start(self) -> None:
        """Listens for queries."""
        await self._bus.subscribe(subjects.REPOSITORY_QUERY, self._on_query)

    def _on_query(self, message: Message) -> None:
        if may_answer(message, subjects.repository_answers("")):
            self._asked.add(message.reply)
            if not self._looking:
                self._looking = True
                self._background.create_task(self._answer())

    @contained(on_error="_answering_failed")
    async def _answer(self) -> None:
        while self._asked:
            asked, self._asked = self._asked, set()
            snapshot = await asyncio.to_thread(self._repository.look)
            problems = self._unfetched() | {name: model.problem for name, model in snapshot.models.items()}
            for subject in asked:
                self._bus.publish(subject, pack_repository_view(RepositoryView(self._worker, problems)))
        self._looking = False

    def _answering_failed(self, _error: Exception) -> None:
        """The next query is answered again. The sender of this one times out and lists the other workers."""
        self._looking = False

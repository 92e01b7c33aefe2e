"""`QueryService`: replies to queries of gateways and other workers: readiness of models, contents of repositories."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from weir.bus.naming import subjects
from weir.bus.naming.reserved_subjects import may_reply_to
from weir.bus.nats.connection import Bus, Message
from weir.repository.layout import ModelRepository
from weir.runtime.containment import contained
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.model_control import ReadinessQuery, ReadinessReply, RepositoryView
from weir.worker.lifecycle.loader import LoadResult

logger = logging.getLogger("weir.worker")

MAX_READINESS_QUERIES = 1_000
"""Readiness queries that wait for models at a time; further ones are answered with "not ready"."""


class QueryService:
    """Replies to queries about `models`, the loaded models by identity, and about `repository`. Runs in the event loop.

    `unfetched()` returns the models of repositories that are not local, with the reason why each could not be fetched ("":
    it can be).
    """

    def __init__(
        self,
        bus: Bus,
        worker_id: str,
        models: Mapping[str, LoadResult],
        repository: ModelRepository,
        unfetched: Callable[[], Awaitable[dict[str, str]]],
    ) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._models = models
        self._repository = repository
        self._unfetched = unfetched
        self._background: asyncio.TaskGroup | None = None
        self._readiness_tasks: set[asyncio.Task[None]] = set()
        self._index_replies: set[str] = set()
        self._is_scanning = False
        self.malformed_messages = 0

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Subscribes to queries; replies in tasks of `background`."""
        self._background = background
        await self._bus.subscribe(subjects.readiness(self._worker_id), self._on_readiness_query)
        await self._bus.subscribe(subjects.REPOSITORY_QUERY, self._on_repository_query)

    # ReadinessReply

    def _on_readiness_query(self, message: Message) -> None:
        assert self._background is not None  # noqa: S101 - set before the subscription
        try:
            query = ReadinessQuery.unpack(message.data)
        except MalformedMessage as error:
            self.malformed_messages += 1
            logger.warning("subject %s: %s", message.subject, error)
            return
        if not may_reply_to(message, subjects.readiness_replies("")):
            return
        if len(self._readiness_tasks) >= MAX_READINESS_QUERIES:
            self._bus.publish(message.reply, ReadinessReply(False).pack())
            return
        task = self._background.create_task(self._reply_readiness(query.model, query.version, message.reply))
        self._readiness_tasks.add(task)
        task.add_done_callback(self._readiness_tasks.discard)

    @contained(on_error="_probe_failed")
    async def _reply_readiness(self, model: str, version: int, reply: str) -> None:
        """Replies whether the version can run and all its available instances report that they are ready."""
        result = self._models.get(model)
        served = None if result is None else result.served.get(version)
        is_ready = served is not None
        if served is not None:
            health = served.model.health
            replies = await asyncio.gather(*(probe.ask() for probe in health.probes()))
            is_ready = all(replies) and not health.problem
        self._bus.publish(reply, ReadinessReply(is_ready).pack())

    def _probe_failed(self, _error: Exception, _model: str, _version: int, reply: str) -> None:
        self._bus.publish(reply, ReadinessReply(False).pack())

    # Repository contents

    def _on_repository_query(self, message: Message) -> None:
        assert self._background is not None  # noqa: S101 - set before the subscription
        if may_reply_to(message, subjects.repository_replies("")):
            self._index_replies.add(message.reply)
            if not self._is_scanning:
                self._is_scanning = True
                self._background.create_task(self._reply_repository())

    @contained(on_error="_scan_failed")
    async def _reply_repository(self) -> None:
        """Scans the repositories in a thread; one scan serves all queries that came before it started."""
        while self._index_replies:
            replies, self._index_replies = self._index_replies, set()
            snapshot = await asyncio.to_thread(self._repository.snapshot)
            problems = await self._unfetched() | {name: model.problem for name, model in snapshot.models.items()}
            for subject in replies:
                self._bus.publish(subject, RepositoryView(self._worker_id, problems).pack())
        self._is_scanning = False

    def _scan_failed(self, _error: Exception) -> None:
        """Allows the next scan. Senders of the failed queries time out and list the models of the other workers."""
        self._is_scanning = False

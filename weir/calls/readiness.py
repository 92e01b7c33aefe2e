"""`Readiness`: whether a model or the server is ready, by the registry and by models with a readiness check of their own.

Most models have no check, and the registry decides alone. For a Python model with `is_ready`, each request for its
readiness queries its workers, as in Triton; a version is ready when one of its workers replies so. No reply is reused for
a later request: requests that arrive during a query share the next one.
"""

from __future__ import annotations

import asyncio
import logging

from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus
from weir.bus.nats.replies import ReplyInbox
from weir.calls.catalog import Catalog
from weir.runtime.log_limiter import LogLimiter
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.model_control import ReadinessQuery, ReadinessReply

logger = logging.getLogger("weir.calls")

_limited = LogLimiter(logger)

RESPONSE_TIMEOUT_S = 6.0
"""How long workers may take to reply, of which their models have 5 s; then the version is not ready."""

Key = tuple[str, int]
"""A model's identity and a version."""


class Readiness:
    """The readiness of models and of the server. Everything runs in one event loop. `caller_id` is the role's."""

    def __init__(self, bus: Bus, caller_id: str, catalog: Catalog) -> None:
        self._replies = ReplyInbox(bus, subjects.readiness_replies(caller_id))
        self._catalog = catalog
        self._running: dict[Key, asyncio.Task[bool]] = {}
        self._next: dict[Key, asyncio.Task[bool]] = {}
        self.malformed_messages = 0

    async def start(self) -> None:
        """Subscribes to the replies of workers."""
        await self._replies.start()

    async def is_ready(self, name: str, version: str) -> bool:
        """Whether this version of a model ("" for the latest) is ready; False for an unknown one.

        Raises WeirError (INVALID_ARG) for an invalid version.
        """
        if not self._catalog.is_ready(name, version):
            return False
        served = self._catalog.resolve(name, version)
        return await self._is_confirmed((served.name, int(version or served.latest)))

    async def is_server_ready(self) -> bool:
        """Whether the server is ready. With strict readiness, all models with a check of their own are queried."""
        if not self._catalog.server_ready():
            return False
        if not self._catalog.is_strict:
            return True
        keys = [(served.name, version) for served in self._catalog.served() for version in served.versions]
        queries = [self._is_confirmed(key) for key in keys if self._has_check(key)]
        return all(await asyncio.gather(*queries)) if queries else True

    def _has_check(self, key: Key) -> bool:
        """Whether the workers must be queried: a single replica without a check makes the version ready."""
        rows = [row for _, row in self._catalog.ready_replicas(*key) if not row.problem]
        return bool(rows) and all(row.checks_readiness for row in rows)

    async def _is_confirmed(self, key: Key) -> bool:
        if not self._has_check(key):
            return True
        task = self._next.get(key)
        if task is None:
            task = self._next[key] = asyncio.get_running_loop().create_task(
                self._query_after(self._running.get(key), key)
            )
        return await asyncio.shield(task)

    async def _query_after(self, running: asyncio.Task[bool] | None, key: Key) -> bool:
        if running is not None:
            await asyncio.wait({running})
        task = self._running[key] = self._next.pop(key)
        try:
            return await self._query(key)
        finally:
            if self._running.get(key) is task:
                del self._running[key]

    async def _query(self, key: Key) -> bool:
        """Whether one of the model's workers replies that it is ready."""
        query = ReadinessQuery(*key).pack()
        workers = [worker for worker, row in self._catalog.ready_replicas(*key) if not row.problem]
        tasks = [asyncio.create_task(self._query_worker(worker, query, key)) for worker in workers]
        try:
            for task in asyncio.as_completed(tasks):
                if await task:
                    return True
        finally:
            for unfinished in tasks:
                unfinished.cancel()
        return False

    async def _query_worker(self, worker: str, query: bytes, key: Key) -> bool:
        try:
            reply = await self._replies.request(subjects.readiness(worker), query, timeout_s=RESPONSE_TIMEOUT_S)
            # nats-server replies without data for a worker that is not connected.
            return bool(reply.data) and ReadinessReply.unpack(reply.data).is_ready
        except TimeoutError:
            _limited.warning(
                "late",
                "worker %s did not report in %.0f s whether model '%s' version %d is ready: it counts as not ready",
                worker,
                RESPONSE_TIMEOUT_S,
                *key,
            )
        except MalformedMessage as error:
            self.malformed_messages += 1
            _limited.warning("malformed", "dropped a malformed message about readiness: %s", error)
        return False

"""`Acceptance`: takes a checked request onto disk; only then it is told that it is accepted.

The request lies in stream QUEUE on a subject of its own, by which it is found, or taken back. The same idempotency key
gives the same subject, on which JetStream stores one message: whoever comes second is told of the first.
Source: the IETF's draft "The Idempotency-Key HTTP Header Field".
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import NamedTuple
from uuid import uuid4

from bus import callback_subjects
from bus import durable_subjects as subjects
from bus.acked_publisher import StoreAck
from bus.headers import pack_headers
from bus.stored_messages import StoredMessages
from bus.stored_objects import remove_object
from calls.catalog import ServedModel
from gateway.async_requests.job_ids import JobIds
from gateway.async_requests.queue_depths import UNREACHABLE, QueueDepths
from gateway.async_requests.refusals import just_deleted, no_broker, other_request
from gateway.async_requests.request_headers import AskedLater
from gateway.durable.bodies import digest_of
from gateway.durable.queue_limits import over_bounds
from gateway.durable.store import DurableStore
from schemas.errors import overloaded, queue_full, unavailable
from schemas.queue_bounds import QueueBounds, queue_bounds

MAX_STORING_BYTES = 256 << 20
"""Bodies of requests that JetStream has not acknowledged yet."""

STORE_PATIENCE_S = 10.0
"""How long JetStream's acknowledgement is waited for. A request that has none by then may be stored all the same."""

DELETED = "weir-deleted"
"""The header of a record whose job was deleted: it only keeps the job from being done again."""


class Accepted(NamedTuple):
    """A request that is on disk. `outcome` is there where it had been accepted before, and is done."""

    id: str
    model: str
    outcome: str = ""


class Acceptance:
    """See the module. `bounds` say what may wait for a model that doesn't say it itself."""

    def __init__(
        self, durable: DurableStore, messages: StoredMessages, depths: QueueDepths, bounds: QueueBounds, ids: JobIds
    ) -> None:
        self._bus = durable.bus
        self._durable = durable
        self._messages = messages
        self._depths = depths
        self._bounds = bounds
        self._ids = ids
        self._storing_bytes = 0
        self.prepare: Callable[[str], Awaitable[None]] | None = None
        """Called with a model before a request to it is stored: whoever takes requests up makes sure that it is seen."""

    async def accept(
        self, served: ServedModel, version: str, header_length: str | None, body: bytes, asked: AskedLater
    ) -> Accepted:
        """Stores a request that was checked; returns when it is on disk.

        `body` is KServe's, of which `header_length` bytes are JSON (None: all). Raises WeirError: 429 where the queue is
        full, 503 where it could not be stored, 422 for an idempotency key that came with another body.
        """
        if not self._bus.is_connected:
            raise no_broker()
        model = served.name
        digest = digest_of(body)
        id = self._ids.of_key(model, version, asked.tenant, asked.key) if asked.key else self._ids.new()
        if asked.key:
            known = await self._known(model, version, id, digest)
            if known is not None:
                return known
        await self._check_room(served, len(body))
        if self._storing_bytes and self._storing_bytes + len(body) > MAX_STORING_BYTES:
            raise overloaded("too many requests are being stored")
        ack = await self._store(model, version, id, digest, header_length, body, asked)
        if ack.is_stored and not ack.is_duplicate:
            self._depths.added(model)
            return Accepted(id, model)
        if ack.is_duplicate or ack.is_conflict:
            known = await self._known(model, version, id, digest)
            if known is None:
                raise just_deleted()
            return known
        if ack.is_full:
            raise queue_full(model, ack.description)
        raise unavailable(f"the request could not be stored: {ack.description}")

    async def _known(self, model: str, version: str, id: str, digest: str) -> Accepted | None:
        """The request of this id, where there is one. Raises WeirError (422) where it is another."""
        try:
            record = await self._messages.last(subjects.RESULT_STREAM, subjects.result(model, id))
            if record is None:
                place = subjects.job_event(model, id, version)
                queued = await self._messages.last(subjects.QUEUE_STREAM, place)
                # Between the two looks it may have been done.
                record = queued or await self._messages.last(subjects.RESULT_STREAM, subjects.result(model, id))
        except UNREACHABLE:
            raise no_broker() from None
        if record is None:
            return None
        if DELETED in record.headers:
            raise just_deleted()
        before = record.headers.get("weir-digest", "")
        if before and before != digest:
            raise other_request()
        return Accepted(id, model, record.headers.get("weir-outcome", ""))

    async def _check_room(self, served: ServedModel, size_bytes: int) -> None:
        try:
            if self.prepare is not None:
                await self.prepare(served.name)
            waiting = (await self._depths.of(served.name)).waiting
        except UNREACHABLE:
            raise no_broker() from None
        refusal = over_bounds(served.name, queue_bounds(served.config, self._bounds), waiting, 0, 1, size_bytes)
        if refusal is not None:
            raise refusal

    async def _store(
        self,
        model: str,
        version: str,
        id: str,
        digest: str,
        header_length: str | None,
        body: bytes,
        asked: AskedLater,
    ) -> StoreAck:
        headers = {
            "Nats-Msg-Id": id,
            "Nats-Expected-Last-Subject-Sequence": "0",
            "Weir-Digest": digest,
            **asked.headers,
        }
        if version:
            headers["Weir-Model-Version"] = version
        if header_length is not None:
            headers["Inference-Header-Content-Length"] = header_length
        if asked.callback_url:
            headers["Weir-Reply-To"] = callback_subjects.callback(id, asked.callback_url)
        elif asked.reply_to:
            headers["Weir-Reply-To"] = asked.reply_to
        return await self._publish(subjects.job_event(model, id, version), body, headers)

    async def _publish(self, subject: str, body: bytes, headers: dict[str, str]) -> StoreAck:
        size, name = len(body), ""
        self._storing_bytes += size
        try:
            block = pack_headers(headers)
            if len(block) + size > self._bus.max_payload_bytes:
                name = f"{headers['Nats-Msg-Id']}.{uuid4().hex}"
                await self._put_object(name, body)
                block, body = pack_headers({**headers, "Weir-Object": name}), b""
        except BaseException:
            self._storing_bytes -= size
            raise
        told: asyncio.Future[StoreAck] = asyncio.get_running_loop().create_future()

        def on_stored(ack: StoreAck) -> None:
            self._storing_bytes -= size
            if not told.done():
                told.set_result(ack)

        self._durable.publisher.publish(subject, body, block, on_stored)
        try:
            ack = await asyncio.wait_for(told, STORE_PATIENCE_S)
        except TimeoutError:
            raise no_broker() from None
        if name and (ack.is_duplicate or not ack.is_stored):
            await self._remove_unnamed(subject, name)
        return ack

    async def _remove_unnamed(self, subject: str, name: str) -> None:
        """Removes an object, unless the message that is there is our own, whose first acknowledgement was lost."""
        with contextlib.suppress(*UNREACHABLE):  # then it goes when its time has come
            there = await self._messages.last(subjects.QUEUE_STREAM, subject)
            if there is None or there.headers.get("weir-object", "") != name:
                await remove_object(self._bus, subjects.REQUEST_OBJECTS, name)

    async def _put_object(self, name: str, body: bytes) -> None:
        try:
            store = await self._bus.jetstream.object_store(subjects.REQUEST_OBJECTS)
            await store.put(name, body)
        except UNREACHABLE:
            raise no_broker() from None

"""`Acceptance`: stores asynchronous requests durably; only then are they reported as accepted.

A request lies in stream QUEUE on a subject of its own, by which it is found or removed. The same idempotency key gives the
same subject, on which JetStream stores one message: a second request with the key gets the id of the first.
Source: the IETF's draft "The Idempotency-Key HTTP Header Field".

`AsyncRequestIds`: ids of asynchronous requests. A client that has an id may read the result and delete it; where an access
policy says who clients are, only the owner of the request may. An id is 128 random bits and a code over them and the
owner that only gateways can compute (HMAC with the cluster's secret). So no id can be derived from an idempotency key, an
id that a NATS producer has chosen for a request is never valid here, and another owner's is as one that was never given.

`QueueDepths`: how many requests wait in the durable queue of each model, from JetStream's consumer info, cached briefly.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple
from urllib.parse import quote
from uuid import uuid4

from nats.js.errors import NotFoundError

from weir.bus.naming import durable_subjects as subjects
from weir.bus.nats.connection import BROKER_ERRORS, Bus
from weir.bus.nats.headers import pack_headers
from weir.bus.nats.jetstream import JetStream
from weir.bus.streams.acked_publisher import StoreAck
from weir.bus.streams.consumers import QueueConsumers
from weir.bus.streams.stored_objects import remove_object
from weir.calls.catalog import ServedModel
from weir.calls.inference.documents import digest_of
from weir.durable.api.errors import broker_unavailable, idempotency_key_reused, recently_deleted, store_stalled
from weir.durable.api.options import AsyncRequestOptions
from weir.durable.api.store import DurableStore
from weir.durable.api.stored_results import StoredResults
from weir.durable.requests.queue_limits import queue_full_error
from weir.schemas.config.parameters import QueueBounds, queue_bounds
from weir.schemas.core.errors import overloaded, queue_full, unavailable

MAX_STORING_BYTES = 256 << 20
"""Bytes of request bodies that JetStream has not acknowledged yet; beyond it requests are rejected."""

STORE_TIMEOUT_S = 10.0
"""Timeout of JetStream's acknowledgement. After it the request may be stored nevertheless."""

PROVISION_MAX_AGE_S = 30.0
"""How long a queue that had a consumer is not checked again."""

OWNER_HEADER = "Weir-Owner"
"""Header of a stored request: whose it is, percent-encoded."""

DELETED = "weir-deleted"
"""Header of the record of a deleted request, which only prevents that the request runs again."""


class AcceptedRequest(NamedTuple):
    """An accepted request. `outcome` is set if it was accepted before and has ended."""

    id: str
    model: str
    outcome: str = ""


class Acceptance:
    """Accepts requests. `bounds` limit the queues of models without limits of their own."""

    def __init__(
        self,
        durable: DurableStore,
        messages: JetStream,
        depths: QueueDepths,
        bounds: QueueBounds,
        ids: AsyncRequestIds,
    ) -> None:
        self._bus = durable.bus
        self._durable = durable
        self._messages = messages
        self._depths = depths
        self._bounds = bounds
        self._ids = ids
        self._stored = StoredResults(messages, ids.group, ids.group_of)
        self._storing_bytes = 0
        self.prepare: Callable[[str], Awaitable[None]] | None = None
        """Called with a model before a request to it is stored, to make sure that its queue has a consumer."""

    async def accept(
        self, served: ServedModel, version: str, header_length: str | None, body: bytes, asked: AsyncRequestOptions
    ) -> AcceptedRequest:
        """Stores a request that was checked; returns when it is on disk.

        `body` is KServe's, of which `header_length` bytes are JSON (None: all). Raises WeirError: 429 where the queue
        is full, 503 where it could not be stored, 422 for an idempotency key that came with another body.
        """
        if not self._bus.is_connected:
            raise broker_unavailable()
        if subjects.QUEUE_STREAM in self._durable.publisher.stalled:
            raise store_stalled()
        model = served.name
        digest = digest_of(body)
        ids, owner = self._ids, asked.owner
        id = ids.of_key(model, version, asked.tenant, asked.key, owner) if asked.key else ids.new(owner)
        if asked.key:
            known = await self._known(model, version, id, digest)
            if known is not None:
                return known
        async with self._stored.room(asked.results_limit):
            return await self._accept(served, version, id, digest, header_length, body, asked)

    async def _accept(  # noqa: PLR0913 - the parts of one stored message
        self,
        served: ServedModel,
        version: str,
        id: str,
        digest: str,
        header_length: str | None,
        body: bytes,
        asked: AsyncRequestOptions,
    ) -> AcceptedRequest:
        model = served.name
        await self._check_room(served, len(body))
        if self._storing_bytes and self._storing_bytes + len(body) > MAX_STORING_BYTES:
            raise overloaded("too many requests are waiting to be stored")
        ack = await self._store(model, version, id, digest, header_length, body, asked)
        if ack.is_stored and not ack.is_duplicate:
            self._depths.added(model)
            return AcceptedRequest(id, model)
        if ack.is_duplicate or ack.is_conflict:
            known = await self._known(model, version, id, digest)
            if known is None:
                raise recently_deleted()
            return known
        if ack.is_full:
            raise queue_full(model, ack.description)
        raise unavailable(f"the request could not be stored: {ack.description}")

    async def _known(self, model: str, version: str, id: str, digest: str) -> AcceptedRequest | None:
        """The accepted request with this id, if stored is one. Raises WeirError (422) if its body differs."""
        try:
            record = await self._messages.last(subjects.RESULT_STREAM, subjects.result(model, id))
            if record is None:
                place = subjects.job_event(model, id, version)
                queued = await self._messages.last(subjects.QUEUE_STREAM, place)
                # It may have ended between the two lookups.
                record = queued or await self._messages.last(subjects.RESULT_STREAM, subjects.result(model, id))
        except BROKER_ERRORS:
            raise broker_unavailable() from None
        if record is None:
            return None
        if DELETED in record.headers:
            raise recently_deleted()
        before = record.headers.get("weir-digest", "")
        if before and before != digest:
            raise idempotency_key_reused()
        return AcceptedRequest(id, model, record.headers.get("weir-outcome", ""))

    async def _check_room(self, served: ServedModel, size_bytes: int) -> None:
        try:
            if self.prepare is not None:
                await self.prepare(served.name)
            waiting = (await self._depths.of(served.name)).waiting
        except BROKER_ERRORS:
            raise broker_unavailable() from None
        refusal = queue_full_error(served.name, queue_bounds(served.config, self._bounds), waiting, 0, 1, size_bytes)
        if refusal is not None:
            raise refusal

    async def _store(  # noqa: PLR0913 - the parts of one stored message
        self,
        model: str,
        version: str,
        id: str,
        digest: str,
        header_length: str | None,
        body: bytes,
        asked: AsyncRequestOptions,
    ) -> StoreAck:
        headers = {
            "Nats-Msg-Id": id,
            "Nats-Expected-Last-Subject-Sequence": "0",
            "Weir-Digest": digest,
            **asked.headers,
        }
        if version:
            headers["Weir-Model-Version"] = version
        if asked.owner:
            headers[OWNER_HEADER] = quote(asked.owner)
        if header_length is not None:
            headers["Inference-Header-Content-Length"] = header_length
        if asked.callback_url:
            headers["Weir-Reply-To"] = subjects.callback(id, asked.callback_url)
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
        acknowledged: asyncio.Future[StoreAck] = asyncio.get_running_loop().create_future()

        def on_stored(ack: StoreAck) -> None:
            self._storing_bytes -= size
            if not acknowledged.done():
                acknowledged.set_result(ack)

        def on_stalled() -> None:
            if not acknowledged.done():
                acknowledged.set_exception(store_stalled())

        self._durable.publisher.publish(subject, body, block, on_stored, on_stalled)
        try:
            ack = await asyncio.wait_for(acknowledged, STORE_TIMEOUT_S)
        except TimeoutError:
            raise broker_unavailable() from None
        if name and (ack.is_duplicate or not ack.is_stored):
            await self._remove_unnamed(subject, name)
        return ack

    async def _remove_unnamed(self, subject: str, name: str) -> None:
        """Removes an object, unless the stored message names it: then the acknowledgement of the first attempt was lost."""
        with contextlib.suppress(*BROKER_ERRORS):  # it expires later
            stored = await self._messages.last(subjects.QUEUE_STREAM, subject)
            if stored is None or stored.headers.get("weir-object", "") != name:
                await remove_object(self._bus, subjects.REQUEST_OBJECTS, name)

    async def _put_object(self, name: str, body: bytes) -> None:
        try:
            store = await self._bus.jetstream.object_store(subjects.REQUEST_OBJECTS)
            await store.put(name, body)
        except BROKER_ERRORS:
            raise broker_unavailable() from None


NONCE_DIGITS = 32
CODE_DIGITS = 16
ID_DIGITS = NONCE_DIGITS + CODE_DIGITS
"""Hexadecimal digits of an id: the random part, and the code that proves its origin."""

GROUP_DIGITS = 12
"""Those of its owner, ahead of the others, where it has one."""


class QueueProvisioner:
    """Makes sure that a model's durable queue has a consumer, for a gateway that does not consume it itself.

    The process that does finds the queue by its consumer.
    """

    def __init__(self, bus: Bus) -> None:
        self._consumers = QueueConsumers(bus)
        self._checked_s: dict[str, float] = {}

    async def ensure(self, model: str) -> None:
        """Creates the consumer unless it exists or was checked recently. Raises as `QueueConsumers.ensure`."""
        now_s = time.monotonic()
        if now_s - self._checked_s.get(model, -PROVISION_MAX_AGE_S) < PROVISION_MAX_AGE_S:
            return
        await self._consumers.ensure("event", model)
        if len(self._checked_s) >= _MAX_CACHED_DEPTHS:
            self._checked_s.clear()
        self._checked_s[model] = now_s


class AsyncRequestIds:
    """Creates and checks ids. `secret` returns the cluster's secret, which is the same at every gateway."""

    def __init__(self, secret: Callable[[], bytes]) -> None:
        self._secret = secret

    def new(self, owner: str = "") -> str:
        """A new id, for a request without an idempotency key."""
        return self._signed(secrets.token_hex(NONCE_DIGITS // 2), owner)

    def of_key(self, model: str, version: str, tenant: str, key: str, owner: str = "") -> str:
        """The id of the request of `owner` with this idempotency key; the same at every gateway."""
        parts = (model, version, tenant, key, owner) if owner else (model, version, tenant, key)
        return self._signed(self._code("key", parts)[:NONCE_DIGITS], owner)

    def is_genuine(self, id: str, owner: str = "") -> bool:
        """Whether a gateway of this cluster has created the id, for a request of `owner` ("" without an access policy)."""
        start = GROUP_DIGITS if owner else 0
        if len(id) != start + ID_DIGITS or not id.isascii():
            return False
        return hmac.compare_digest(self._signed(id[start : start + NONCE_DIGITS], owner), id)

    def group(self, owner: str) -> str:
        """What the ids of `owner` begin with; "" for requests without an owner. Tells nobody who the owner is."""
        return self._code("owner", (owner,))[:GROUP_DIGITS] if owner else ""

    def group_of(self, id: str) -> str:
        """The group of an id of a gateway; "-" for ids that others have chosen."""
        digits = len(id)
        if digits == ID_DIGITS:
            return ""
        return id[:GROUP_DIGITS] if digits == GROUP_DIGITS + ID_DIGITS else "-"

    def _signed(self, nonce: str, owner: str) -> str:
        code = self._code("id", (nonce, owner) if owner else (nonce,))[:CODE_DIGITS]
        return f"{self.group(owner)}{nonce}{code}"

    def _code(self, purpose: str, parts: Iterable[str]) -> str:
        code = hmac.new(self._secret(), digestmod=hashlib.sha256)
        for part in (purpose, *parts):
            data = part.encode()
            code.update(len(data).to_bytes(8, "big"))  # so that different lists of parts never give the same bytes
            code.update(data)
        return code.hexdigest()


DEPTH_MAX_AGE_S = 0.5
"""How long a depth is cached."""

_MAX_CACHED_DEPTHS = 4096


class QueueDepth(NamedTuple):
    """The `waiting` and running requests of a model; `taken` is the sequence of the last message that was delivered."""

    waiting: int = 0
    taken: int = 0


class _CachedDepth:
    __slots__ = ("added", "depth", "known_s")

    def __init__(self, depth: QueueDepth, known_s: float) -> None:
        self.depth = depth
        self.known_s = known_s
        self.added = 0


class QueueDepths:
    """Depths by model. Requests that this gateway has stored since are added."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._kept: dict[str, _CachedDepth] = {}

    async def of(self, model: str) -> QueueDepth:
        """The depth of the queue of `model`. Raises NatsError, OSError or TimeoutError without a broker."""
        kept = self._kept.get(model)
        now_s = time.monotonic()
        if kept is None or now_s - kept.known_s > DEPTH_MAX_AGE_S:
            depth = await self._ask(model)
            if len(self._kept) >= _MAX_CACHED_DEPTHS:
                self._kept.clear()
            kept = self._kept[model] = _CachedDepth(depth, now_s)
        return QueueDepth(kept.depth.waiting + kept.added, kept.depth.taken)

    def added(self, model: str) -> None:
        """Counts a request that this gateway has stored."""
        kept = self._kept.get(model)
        if kept is not None:
            kept.added += 1

    async def _ask(self, model: str) -> QueueDepth:
        name = subjects.durable_consumer("event", model)
        try:
            info = await self._bus.jetstream.consumer_info(subjects.QUEUE_STREAM, name)
        except NotFoundError:
            return QueueDepth()  # the queue has no consumer yet
        taken = info.delivered.stream_seq if info.delivered is not None else 0
        return QueueDepth((info.num_pending or 0) + (info.num_ack_pending or 0), taken)

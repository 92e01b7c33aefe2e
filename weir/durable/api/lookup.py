"""`AsyncRequestLookup`: states and results of asynchronous requests; it also waits for, cancels and deletes them.

Everything lies in the streams, so every gateway returns the same. A request has ended if it has a terminal record in stream
RESULT; else its message is in stream QUEUE, on a subject of its own. To cancel a request, the terminal record is written
first: either this record is stored, or that of the response. Only requests that gateways have accepted are visible, which
their ids prove (`AsyncRequestIds`).

`AsyncRequestState`: the state of such a request, as clients get it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import orjson

from weir.bus.naming import durable_subjects as subjects
from weir.bus.naming.subjects import untoken
from weir.bus.nats.connection import BROKER_ERRORS, Bus, Message
from weir.bus.nats.headers import pack_headers
from weir.bus.nats.jetstream import JetStream, StoredMessage
from weir.bus.streams.acked_publisher import AckedPublisher, StoreAck
from weir.bus.streams.stored_objects import CorruptObject, StoredObject, remove_object
from weir.durable.api.acceptance import DELETED, STORE_TIMEOUT_S, AsyncRequestIds, QueueDepths
from weir.durable.api.errors import broker_unavailable, job_not_done, job_not_found, result_gone
from weir.schemas.core.errors import ErrorCode, WeirError, internal, unavailable
from weir.schemas.kserve.response import error_body
from weir.schemas.wire.terminal import Outcome, TerminalRecord

logger = logging.getLogger("weir.gateway")


MAX_WAITING_CLIENTS = 10_000
"""Clients that wait for the end of a request; further ones get its current state at once."""

_STORE_POLL_S = 0.02  # between lookups of a record that was published
_RECORD_POLL_S = 1.0  # between lookups without a notification

MAX_SHOWN_ID = 128
"""Characters of an unknown id that an error message repeats."""

_CANCELLED = WeirError(ErrorCode.CANCELLED, "the request was cancelled")
_TTL_HEADER = "weir-result-ttl-secs"


class AsyncRequestLookup:
    """Looks requests up. Everything runs in one event loop. Methods that need the broker raise 503 without it."""

    def __init__(
        self, bus: Bus, publisher: AckedPublisher, messages: JetStream, depths: QueueDepths, ids: AsyncRequestIds
    ) -> None:
        self._bus = bus
        self._publisher = publisher
        self._messages = messages
        self._depths = depths
        self._ids = ids
        self._waiters: set[asyncio.Future[None]] = set()
        self._is_stopping = False

    def stop(self) -> None:
        """Ends all waits."""
        self._is_stopping = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    @property
    def waiting(self) -> int:
        """Clients that wait for the end of a request."""
        return len(self._waiters)

    async def state(self, id: str, owner: str = "", wait_s: float = 0.0) -> AsyncRequestState:
        """The state of a request of `owner`, once it has ended or after `wait_s`. Raises StatusError (404)."""
        state = await self._find(id, owner)
        if state is None:
            raise job_not_found(id[:MAX_SHOWN_ID])
        if state.is_done or not wait_s or self._is_stopping or len(self._waiters) >= MAX_WAITING_CLIENTS:
            return state
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_s
        waiter: asyncio.Future[None] = loop.create_future()

        def on_record(_message: Message) -> None:
            if not waiter.done():
                waiter.set_result(None)

        unsubscribe = await self._bus.subscribe(subjects.any_result(id), on_record)
        self._waiters.add(waiter)
        try:
            state = await self._find(id, owner) or state  # it may have ended before the subscription
            while not (state.is_done or self._is_stopping) and (left_s := until_s - loop.time()) > 0:
                if waiter.done():
                    # A record is received when it is published, and is stored a moment later.
                    await asyncio.sleep(min(left_s, _STORE_POLL_S))
                else:
                    # A record published before the subscription, and stored after the lookup, sends no notification.
                    await asyncio.wait((waiter,), timeout=min(left_s, _RECORD_POLL_S))
                state = await self._find(id, owner) or state
        finally:
            self._waiters.discard(waiter)
            unsubscribe()
        return state

    async def result(self, id: str, owner: str = "") -> AsyncRequestState:
        """The state of a request that has ended with a response. Raises StatusError: 404; 409 while it has not ended; 410
        without a response, because it was cancelled or has expired.
        """
        state = await self.state(id, owner)
        if state.record is None:
            raise job_not_done(id, state.status)
        if state.record.outcome in (Outcome.CANCELLED, Outcome.EXPIRED):
            raise result_gone(state.error)
        return state

    async def result_object(self, state: AsyncRequestState) -> StoredObject | None:
        """The object that holds a large response, None for others. Raises StatusError (410) if the object has expired."""
        name = "" if state.message is None else state.message.headers.get("weir-object", "")
        if not name:
            return None
        try:
            found = await StoredObject.find(self._messages, subjects.RESULT_OBJECTS, name)
        except BROKER_ERRORS:
            raise broker_unavailable() from None
        except CorruptObject as error:
            raise internal(f"the result of job '{state.id}' can't be read: {error}") from error
        if found is None:
            raise result_gone(f"the result of job '{state.id}' has expired")
        return found

    async def cancel(self, id: str, owner: str = "") -> AsyncRequestState:
        """Cancels a request, unless it has ended. Raises StatusError (404)."""
        state = await self.state(id, owner)
        return state if state.is_done else await self._end(state, is_deleted=False)

    async def delete(self, id: str, owner: str = "") -> None:
        """Cancels a request that has not ended, and deletes it. An unknown id is not an error."""
        state = await self._find(id, owner)
        if state is None:
            return
        if not state.is_done:
            state = await self._end(state, is_deleted=True)
            if state.message is not None and DELETED in state.message.headers:
                return
        await self._delete_records(state)

    async def _find(self, id: str, owner: str) -> AsyncRequestState | None:
        if not self._ids.is_genuine(id, owner):
            return None  # as for an unknown id: requests that arrived over NATS, and those of others, are not visible
        try:
            record = await self._messages.last(subjects.RESULT_STREAM, subjects.any_result(id))
            queued = None
            if record is None:
                queued = await self._messages.last(subjects.QUEUE_STREAM, *subjects.any_job_event(id))
            if record is None and queued is None:  # it may have ended between the two lookups
                record = await self._messages.last(subjects.RESULT_STREAM, subjects.any_result(id))
            if record is not None:
                return None if DELETED in record.headers else AsyncRequestState.of_record(record)
            if queued is None:
                return None
            state = AsyncRequestState.of_request(id, queued)
            if queued.sequence <= (await self._depths.of(state.model)).taken:
                state.status = AsyncRequestStatus.RUNNING.value
            return state
        except BROKER_ERRORS:
            raise broker_unavailable() from None
        except ValueError:
            logger.warning("the stored record of request %s is malformed; it is treated as missing", id)
            return None

    async def _end(self, state: AsyncRequestState, is_deleted: bool) -> AsyncRequestState:
        """Stores the record of a cancelled request unless it has one; returns the state with the stored record."""
        asked = {} if state.message is None else state.message.headers
        record = TerminalRecord(
            state.id,
            state.model,
            Outcome.CANCELLED,
            version=state.version,
            accepted_ms=state.accepted_ms,
            ended_ms=int(time.time() * 1000),
            status=_CANCELLED.http_status,
            tenant=asked.get("weir-tenant", ""),
            digest=asked.get("weir-digest", ""),
        )
        headers = [
            *record.headers(),
            ("Content-Type", "application/json"),
            ("Nats-Expected-Last-Subject-Sequence", "0"),
        ]
        if asked.get(_TTL_HEADER, "").isdigit():
            headers.append(("Nats-TTL", f"{asked[_TTL_HEADER]}s"))
        if is_deleted:
            headers.append((DELETED, "true"))
        ack = await self._store(subjects.result(state.model, state.id), error_body(_CANCELLED.message), headers)
        if not ack.is_stored and not ack.is_conflict:
            raise unavailable(f"the job could not be cancelled: {ack.description}")
        if ack.is_stored:
            reported = orjson.dumps({"id": state.id, "model": state.model})
            self._bus.publish(subjects.CANCEL_DURABLE, reported)
        try:
            found = await self._messages.last(subjects.RESULT_STREAM, subjects.result(state.model, state.id))
        except BROKER_ERRORS:
            raise broker_unavailable() from None
        if found is None:
            raise job_not_found(state.id)
        return AsyncRequestState.of_record(found)

    async def _delete_records(self, state: AsyncRequestState) -> None:
        subject = subjects.result(state.model, state.id)
        try:
            places = subjects.any_job_event(state.id, state.model)
            if await self._messages.last(subjects.QUEUE_STREAM, *places) is None:
                await self._bus.jetstream.purge_stream(subjects.RESULT_STREAM, subject=subject)
            elif state.record is not None:
                # Without a record the request that still waits there would run.
                headers = [*state.record.headers(), ("Nats-Expected-Last-Subject-Sequence", str(state.sequence))]
                await self._store(subject, b"", [*headers, (DELETED, "true")])
            name = "" if state.message is None else state.message.headers.get("weir-object", "")
            if name:
                await remove_object(self._bus, subjects.RESULT_OBJECTS, name)
        except BROKER_ERRORS:
            raise broker_unavailable() from None

    async def _store(self, subject: str, body: bytes, headers: list[tuple[str, str]]) -> StoreAck:
        try:
            return await asyncio.wait_for(self._publisher.store(subject, body, pack_headers(headers)), STORE_TIMEOUT_S)
        except TimeoutError:
            raise broker_unavailable() from None


_MAX_ERROR_LENGTH = 1024


class AsyncRequestStatus(StrEnum):
    """The status without a terminal record; with one, it is the outcome of the record."""

    QUEUED = "queued"
    RUNNING = "running"
    """Delivered to the owner of the model's queue; its turn among other requests may still be to come."""


@dataclass(slots=True)
class AsyncRequestState:
    """The state of one request. `record` is set once it has ended; `message` is the stored record, or else the request."""

    id: str
    model: str
    status: str
    version: str = ""
    accepted_ms: int = 0
    sequence: int = 0
    record: TerminalRecord | None = None
    message: StoredMessage | None = field(default=None, repr=False)

    @classmethod
    def of_record(cls, message: StoredMessage) -> AsyncRequestState:
        """The state from a message of stream RESULT. Raises ValueError if it is not a terminal record."""
        record = TerminalRecord.of(message.headers)
        return cls(
            record.id,
            record.model,
            record.outcome.value,
            record.version,
            record.accepted_ms,
            message.sequence,
            record,
            message,
        )

    @classmethod
    def of_request(cls, id: str, message: StoredMessage) -> AsyncRequestState:
        """The state from a message of stream QUEUE, as long as that was not delivered."""
        model, version = untoken(message.subject.split(".")[1]), message.headers.get("weir-model-version", "")
        queued = AsyncRequestStatus.QUEUED.value
        return cls(id, model, queued, version, message.stored_ms, message.sequence, message=message)

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self.record is not None

    @property
    def error(self) -> str:
        """Why it failed; "" if it succeeded or has not ended."""
        if self.record is None or self.message is None or self.record.outcome is Outcome.SUCCEEDED:
            return ""
        try:
            reported = orjson.loads(self.message.data)["error"]
        except (ValueError, KeyError, TypeError):
            reported = ""
        return str(reported)[:_MAX_ERROR_LENGTH] or self.record.outcome.value

    def document(self) -> dict[str, Any]:
        """The state as the JSON that clients get."""
        document: dict[str, Any] = {"id": self.id, "model": self.model}
        if self.version:
            document["version"] = self.version
        document["status"] = self.status
        if self.accepted_ms:
            document |= {"accepted": iso_time(self.accepted_ms), "accepted_ms": self.accepted_ms}
        record = self.record
        if record is not None:
            document |= {"ended": iso_time(record.ended_ms), "ended_ms": record.ended_ms, "attempts": record.attempts}
            history = [
                {"ended": iso_time(attempt.ended_ms), "ended_ms": attempt.ended_ms, "reason": attempt.reason}
                for attempt in record.history
            ]
            document |= {"history": history, "result": f"/v2/jobs/{self.id}/result"}
            if self.error:
                document["error"] = self.error
        return document


def iso_time(unix_ms: int) -> str:
    """A time in ISO 8601, UTC, with milliseconds."""
    try:
        time = datetime.fromtimestamp(unix_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return ""
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")

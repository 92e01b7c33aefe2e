"""`RequestJobs`: what became of requests that are answered later: their states, waits for them, cancelling, deleting.

All of it lies in the streams, so every gateway can tell. A terminal record in RESULT is the end; else the request's message
lies in QUEUE, on a subject of its own. To cancel is to write the terminal record first: it stands, or the answer's does.
Only requests that gateways have accepted are told of, which their ids prove (`job_ids`).
"""

from __future__ import annotations

import asyncio
import logging
import time

import orjson

from bus import durable_subjects as subjects
from bus.acked_publisher import AckedPublisher, StoreAck
from bus.connection import Bus, Message
from bus.headers import pack_headers
from bus.stored_messages import StoredMessages
from bus.stored_objects import DamagedObject, StoredObject, remove_object
from gateway.async_requests.acceptance import DELETED, STORE_PATIENCE_S
from gateway.async_requests.job_ids import JobIds
from gateway.async_requests.job_state import JobState, JobStatus
from gateway.async_requests.queue_depths import UNREACHABLE, QueueDepths
from gateway.async_requests.refusals import gone, no_broker, no_job, not_done
from schemas.errors import ErrorCode, WeirError, internal, unavailable
from schemas.kserve_response import error_body
from schemas.terminal import Outcome, TerminalRecord

logger = logging.getLogger("weir.gateway")

MAX_WAITING = 10_000
"""Clients that wait for the end of a job; more are answered at once."""

_STORING_S = 0.02  # between looks for a record that was published
_LOOK_S = 1.0  # between looks for one of which nothing was heard

MAX_SHOWN_ID = 128
"""Characters of what was asked for that an error repeats."""

_CANCELLED = WeirError(ErrorCode.CANCELLED, "the request was cancelled")
_TTL_HEADER = "weir-result-ttl-secs"


class RequestJobs:
    """See the module. Everything runs in one event loop. What needs the broker raises 503 where it is away."""

    def __init__(
        self, bus: Bus, publisher: AckedPublisher, messages: StoredMessages, depths: QueueDepths, ids: JobIds
    ) -> None:
        self._bus = bus
        self._publisher = publisher
        self._messages = messages
        self._depths = depths
        self._ids = ids
        self._waiters: set[asyncio.Future[None]] = set()
        self._is_stopping = False

    def stop(self) -> None:
        """Nobody is to wait any longer."""
        self._is_stopping = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    @property
    def waiting(self) -> int:
        """Clients that wait for the end of a job."""
        return len(self._waiters)

    async def state(self, id: str, wait_s: float = 0.0) -> JobState:
        """The job's state, once it is done or `wait_s` have passed. Raises StatusError (404)."""
        state = await self._look(id)
        if state is None:
            raise no_job(id[:MAX_SHOWN_ID])
        if state.is_done or not wait_s or self._is_stopping or len(self._waiters) >= MAX_WAITING:
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
            state = await self._look(id) or state  # it may have ended before anybody listened
            while not (state.is_done or self._is_stopping) and (left_s := until_s - loop.time()) > 0:
                if waiter.done():
                    # A record is seen as it is published, and stored a moment later, with others perhaps.
                    await asyncio.sleep(min(left_s, _STORING_S))
                else:
                    # One that was published before we listened, and was not stored when we looked, wakes nobody.
                    await asyncio.wait((waiter,), timeout=min(left_s, _LOOK_S))
                state = await self._look(id) or state
        finally:
            self._waiters.discard(waiter)
            unsubscribe()
        return state

    async def result(self, id: str) -> JobState:
        """The job, which is done and has an answer. Raises StatusError: 404, 409 while it is not done, 410 where there
        is no answer: it was cancelled, or has expired.
        """
        state = await self.state(id)
        if state.record is None:
            raise not_done(id, state.status)
        if state.record.outcome in (Outcome.CANCELLED, Outcome.EXPIRED):
            raise gone(state.error)
        return state

    async def answer_object(self, state: JobState) -> StoredObject | None:
        """The object with a job's answer, where that is larger than a message. Raises StatusError (410) if it is gone."""
        name = "" if state.message is None else state.message.headers.get("weir-object", "")
        if not name:
            return None
        try:
            found = await StoredObject.find(self._messages, subjects.RESULT_OBJECTS, name)
        except UNREACHABLE:
            raise no_broker() from None
        except DamagedObject as error:
            raise internal(f"the result of job '{state.id}' can't be read: {error}") from error
        if found is None:
            raise gone(f"the result of job '{state.id}' is not kept any more")
        return found

    async def cancel(self, id: str) -> JobState:
        """Ends a job that is not done; one that is stays as it is. Raises StatusError (404)."""
        state = await self.state(id)
        return state if state.is_done else await self._end(state, is_deleted=False)

    async def delete(self, id: str) -> None:
        """Cancels a job that is not done, and forgets it; one that isn't there is no error."""
        state = await self._look(id)
        if state is None:
            return
        if not state.is_done:
            state = await self._end(state, is_deleted=True)
            if state.message is not None and DELETED in state.message.headers:
                return
        await self._forget(state)

    async def _look(self, id: str) -> JobState | None:
        if not self._ids.is_genuine(id):
            return None  # as if there were none: who asks is not told of requests that came by NATS
        try:
            record = await self._messages.last(subjects.RESULT_STREAM, subjects.any_result(id))
            queued = None
            if record is None:
                queued = await self._messages.last(subjects.QUEUE_STREAM, *subjects.any_job_event(id))
            if record is None and queued is None:  # between the two looks it may have been done
                record = await self._messages.last(subjects.RESULT_STREAM, subjects.any_result(id))
            if record is not None:
                return None if DELETED in record.headers else JobState.of_record(record)
            if queued is None:
                return None
            state = JobState.of_request(id, queued, 0)
            if queued.sequence <= (await self._depths.of(state.model)).taken:
                state.status = JobStatus.RUNNING.value
            state.message = queued
            return state
        except UNREACHABLE:
            raise no_broker() from None
        except ValueError:
            logger.warning("a record of job '%s' is malformed", id)
            return None

    async def _end(self, state: JobState, is_deleted: bool) -> JobState:
        """Writes the record of a cancelled request, if none is there; returns what is there then."""
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
            told = orjson.dumps({"id": state.id, "model": state.model})
            self._bus.publish(subjects.CANCEL_DURABLE, told)
        try:
            found = await self._messages.last(subjects.RESULT_STREAM, subjects.result(state.model, state.id))
        except UNREACHABLE:
            raise no_broker() from None
        if found is None:
            raise no_job(state.id)
        return JobState.of_record(found)

    async def _forget(self, state: JobState) -> None:
        subject = subjects.result(state.model, state.id)
        try:
            places = subjects.any_job_event(state.id, state.model)
            if await self._messages.last(subjects.QUEUE_STREAM, *places) is None:
                await self._bus.jetstream.purge_stream(subjects.RESULT_STREAM, subject=subject)
            elif state.record is not None:
                # What waits there would be done again if there were no record of it.
                headers = [*state.record.headers(), ("Nats-Expected-Last-Subject-Sequence", str(state.sequence))]
                await self._store(subject, b"", [*headers, (DELETED, "true")])
            name = "" if state.message is None else state.message.headers.get("weir-object", "")
            if name:
                await remove_object(self._bus, subjects.RESULT_OBJECTS, name)
        except UNREACHABLE:
            raise no_broker() from None

    async def _store(self, subject: str, body: bytes, headers: list[tuple[str, str]]) -> StoreAck:
        try:
            return await asyncio.wait_for(self._publisher.store(subject, body, pack_headers(headers)), STORE_PATIENCE_S)
        except TimeoutError:
            raise no_broker() from None

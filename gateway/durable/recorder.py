"""`Recorder`: the end of a durable request: its terminal record, then the answer to who asked, then the acknowledgement.

In this order a death at any point costs a second execution at most. The first record of an id stands: whoever comes second
finds it, and what it says is the answer. A request that can't be done is copied to stream DEAD before its record.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from nats.errors import Error as NatsError

from bus import durable_subjects as subjects
from bus.acked_publisher import AckedPublisher, StoreAck
from bus.connection import Bus
from bus.headers import last_header, pack_headers
from bus.jetstream_api import JetStreamApi
from bus.stored_messages import StoredMessage
from bus.subjects import token
from gateway.durable.bodies import digest_of, encode_error
from gateway.durable.counters import DurableCounters
from gateway.durable.dead_letters import DeadLetters
from gateway.durable.durable_request import DurableRequest, Stage
from gateway.durable.objects import ObjectBodies
from gateway.durable.record_lines import RecordLines
from gateway.durable.record_store import RecordStore
from gateway.durable.reply_outbox import ReplyOutbox
from runtime.containment import contained
from schemas.errors import ErrorCode, WeirError, internal
from schemas.kserve_response import error_body
from schemas.terminal import Outcome, TerminalRecord

logger = logging.getLogger("weir.gateway")

_VERSION_LINE = b"NATS/1.0\r\n"
_SPARE_BYTES = 1024  # what headers added on the way take
_RETRY_S = 1.0
_CONFLICT_STATUS = 409
_LOOKUPS_AT_A_TIME = 64
_MAX_COUNT_DIGITS = 8

Headers = list[tuple[str, str]]

_NOT_RECORDED = (
    "nats-sequence",
    "nats-stream",
    "nats-subject",
    "nats-time-stamp",
    "nats-last-sequence",
    "nats-num-pending",
    "nats-expected-last-subject-sequence",
    "nats-batch-id",
    "nats-batch-sequence",
    "nats-batch-commit",
    "nats-ttl",
    "nats-msg-id",
)


class Recorder:
    """See the module. `request.on_ended` is called when all is done but the acknowledgement, which is for its owner."""

    def __init__(
        self,
        bus: Bus,
        publisher: AckedPublisher,
        api: JetStreamApi,
        objects: ObjectBodies,
        counters: DurableCounters,
        outbox: ReplyOutbox,
    ) -> None:
        self._bus = bus
        self._publisher = publisher
        self._api = api
        self._objects = objects
        self._outbox = outbox
        self._counters = counters
        self._records = RecordStore(bus, publisher)
        self._lines = RecordLines()
        self._dead = DeadLetters(bus, publisher)
        self._background: asyncio.TaskGroup | None = None
        self._lookups = asyncio.Semaphore(_LOOKUPS_AT_A_TIME)
        self._ending = 0
        self._lookup_tasks: set[asyncio.Task[None]] = set()

    def start(self, background: asyncio.TaskGroup) -> None:
        """Looks records up in tasks of `background`."""
        self._background = background

    def stop(self) -> None:
        """Looks nothing up any more."""
        for task in self._lookup_tasks:
            task.cancel()

    def __len__(self) -> int:
        """Requests whose end is known and not recorded yet."""
        return self._ending

    @contained(on_error="_fail_broken")
    def succeed(self, request: DurableRequest, headers: Headers, body: bytes, version: str) -> None:
        """The request has its answer, the last one if there are several."""
        block = self._lines.of_success(request, version, headers, time.time_ns() // 1_000_000)
        if block is None or len(block) + len(body) + _SPARE_BYTES > self._bus.max_payload_bytes:
            self._end(request, Outcome.SUCCEEDED, 200, headers, body, version)
            return
        self._begin(request)
        self._store(request, Outcome.SUCCEEDED, block, body)

    @contained(on_error="_record_briefly")
    def fail(self, request: DurableRequest, outcome: Outcome, error: WeirError, status: int = 0) -> None:
        """The request ends with an error."""
        headers, body = encode_error(error, request.format)
        self._end(request, outcome, status or error.http_status, headers, body)

    @contained(on_error="_fail_unburied")
    def bury(self, request: DurableRequest, error: WeirError) -> None:
        """The request can't be done: it goes to DEAD, and the error is its answer."""
        self._begin(request)
        self._dead.add(request, error.message, partial(self._buried, request, error))

    def respond(self, request: DurableRequest, number: int, headers: Headers, body: bytes) -> None:
        """Publishes a response that is not the last, and stores it under the request's id and this number."""
        told = [("Weir-Id", request.id), ("Weir-Model", request.model), ("Weir-Response", str(number)), *headers]
        self._answer(request, str(number), pack_headers([*told, ("Weir-Final", "false")]), body)
        if len(body) + _SPARE_BYTES * 4 <= self._bus.max_payload_bytes:
            subject = f"{subjects.result(request.model, request.id)}.{number}"
            lines = pack_headers([*told, *_ttl(request)])[len(_VERSION_LINE) :]
            self._records.add(subject, lines, body, _ignore)

    def settle(
        self,
        request: DurableRequest,
        on_none: Callable[[], None],
        on_found: Callable[[DurableRequest], None] | None = None,
    ) -> None:
        """Ends the request with the record that its id has, telling `on_found`; calls `on_none` where there is none."""
        assert self._background is not None  # noqa: S101 - it was started
        task = self._background.create_task(self._settle(request, on_none, on_found))
        self._lookup_tasks.add(task)
        task.add_done_callback(self._lookup_tasks.discard)

    # How a request ends when one of these raises an unexpected exception

    def _fail_broken(self, _error: Exception, request: DurableRequest, *_others: object) -> None:
        self.fail(request, Outcome.FAILED, internal("the response could not be recorded"))

    def _fail_unburied(self, _error: Exception, request: DurableRequest, error: WeirError, *_others: object) -> None:
        self.fail(request, Outcome.FAILED, error)

    def _record_briefly(self, _error: Exception, request: DurableRequest, *_others: object) -> None:
        """Records a failure with as little as can be said of it, so that there is nothing left that could fail."""
        self._begin(request)
        now_ms = time.time_ns() // 1_000_000
        record = TerminalRecord(request.id, request.model, Outcome.FAILED, ended_ms=now_ms, status=500)
        lines = pack_headers([*record.headers(), ("Content-Type", "application/json")])[len(_VERSION_LINE) :]
        self._store(request, Outcome.FAILED, lines, error_body("unexpected error while the request was recorded"))

    def _acknowledge_broken(
        self, _error: Exception, request: DurableRequest, outcome: Outcome | None = None, *_others: object
    ) -> None:
        if request.stage is not Stage.ENDED:
            self._acknowledge(request, outcome or Outcome.FAILED)

    # How it goes on

    def _begin(self, request: DurableRequest) -> None:
        if request.stage is not Stage.ENDING:
            request.stage = Stage.ENDING
            self._ending += 1

    @contained(on_error="_fail_unburied")
    def _buried(self, request: DurableRequest, error: WeirError) -> None:
        self.fail(request, Outcome.DEAD_LETTERED, error)

    def _end(
        self, request: DurableRequest, outcome: Outcome, status: int, headers: Headers, body: bytes, version: str = ""
    ) -> None:
        self._begin(request)
        record = request.record(outcome, status, time.time_ns() // 1_000_000)
        record.version = version
        told = record.headers()
        if request.responses:
            told.append(("Weir-Responses", str(request.responses + (outcome is Outcome.SUCCEEDED))))
        told += headers
        block = pack_headers(told)[len(_VERSION_LINE) :]
        if len(block) + len(body) + _SPARE_BYTES > self._bus.max_payload_bytes:
            self._store_large(request, outcome, told, body)
        else:
            self._store(request, outcome, block, body)

    def _store_large(self, request: DurableRequest, outcome: Outcome, told: Headers, body: bytes) -> None:
        # A second execution has an object of its own: the record that stands must not lose what it names.
        name = f"{token(request.model)}.{token(request.id)}.{request.delivery.sequence}-{time.time_ns():x}"

        self._objects.put(name, body, partial(self._on_put, request, outcome, told, name))

    @contained(on_error="_record_briefly")
    def _on_put(
        self, request: DurableRequest, outcome: Outcome, told: Headers, name: str, error: WeirError | None
    ) -> None:
        if error is not None:
            self.fail(request, Outcome.FAILED, error)
            return
        block = pack_headers([*told, ("Weir-Object", name)])[len(_VERSION_LINE) :]
        self._store(request, outcome, block, b"")

    def _store(self, request: DurableRequest, outcome: Outcome, lines: bytes, body: bytes) -> None:
        stored = partial(self._on_stored, request, outcome, lines, body)
        subject = subjects.result(request.model, request.id)
        ttl_s = request.terms.result_ttl_s
        kept = b"Nats-TTL: %ds\r\n%b" % (ttl_s, lines) if ttl_s else lines
        self._records.add(subject, kept, body, stored)

    @contained(on_error="_acknowledge_broken")
    def _on_stored(self, request: DurableRequest, outcome: Outcome, lines: bytes, body: bytes, ack: StoreAck) -> None:
        if ack.is_stored:
            self._finish(request, outcome, lines, body)
        elif ack.is_conflict:
            self.settle(request, partial(self._store, request, outcome, lines, body))
        else:
            logger.warning("the record of a request to %s is not stored: %s", request.model, ack.description)
            asyncio.get_running_loop().call_later(_RETRY_S, self._store, request, outcome, lines, body)

    def _finish(self, request: DurableRequest, outcome: Outcome, lines: bytes, body: bytes) -> None:
        self._counters.end(request.model, outcome)
        if request.terms.reply_to:
            copy = last_header(b"\r\n" + lines, b"Weir-Ended-Ms")
            self._answer_last(request, outcome, copy, _VERSION_LINE + b"Weir-Final: true\r\n" + lines, body)
        else:
            self._acknowledge(request, outcome)

    def _acknowledge(self, request: DurableRequest, outcome: Outcome) -> None:
        if request.stage is Stage.ENDED:
            return
        if request.stage is Stage.ENDING:
            self._ending -= 1
        request.stage = Stage.ENDED
        if request.terms.object_name and outcome is not Outcome.DEAD_LETTERED:
            self._objects.delete(request.terms.object_name)
        request.on_ended(request)

    def _answer(self, request: DurableRequest, copy: str, block: bytes, body: bytes, is_repeated: bool = False) -> None:
        """Sends a response that is not the last. `copy` is the same for each copy of it, and for no other response."""
        if request.terms.reply_to:
            self._outbox.send(request.terms.reply_to, body, self._named(request, copy, block), is_repeated=is_repeated)

    def _answer_last(
        self, request: DurableRequest, outcome: Outcome, copy: str, block: bytes, body: bytes, is_repeated: bool = False
    ) -> None:
        """Sends the last response, and acknowledges the request once it has left."""
        if request.terms.reply_to:
            on_left = partial(self._acknowledge, request, outcome)
            block = self._named(request, copy, block)
            self._outbox.send(request.terms.reply_to, body, block, on_left, is_repeated)
        else:
            self._acknowledge(request, outcome)

    @staticmethod
    def _named(request: DurableRequest, copy: str, block: bytes) -> bytes:
        """The headers with the `Nats-Msg-Id` by which a stream on the reply subject stores the response once."""
        name = digest_of(f"{request.model}\0{request.id}\0{copy}".encode(errors="replace"))
        return b"%bNats-Msg-Id: %b\r\n%b" % (_VERSION_LINE, name.encode(), block[len(_VERSION_LINE) :])

    @contained(on_error="_settle_broken")
    async def _settle(
        self,
        request: DurableRequest,
        on_none: Callable[[], None],
        on_found: Callable[[DurableRequest], None] | None,
    ) -> None:
        subject = subjects.result(request.model, request.id)
        while True:
            try:
                async with self._lookups:
                    found = await self._api.last(subjects.RESULT_STREAM, subject)
                    earlier = [] if found is None else await self._earlier_responses(request, found)
                break
            except (NatsError, OSError, TimeoutError):
                await asyncio.sleep(_RETRY_S)
        if request.stage is Stage.ENDED:
            return
        if found is None:
            on_none()
            return
        if on_found is not None:
            if request.stage is Stage.ENDING:
                return  # its own record is on its way, and finds this one
            on_found(request)
        self._on_found(request, found, earlier)

    async def _earlier_responses(self, request: DurableRequest, found: StoredMessage) -> list[StoredMessage]:
        """The responses before the last, which were stored with the record, as far as somebody is to get them again."""
        text = found.headers.get("weir-responses", "")
        if not request.terms.reply_to or not (text.isascii() and text.isdigit() and len(text) < _MAX_COUNT_DIGITS):
            return []
        numbers = range(int(text))
        looked_up = [await self._api.last(subjects.RESULT_STREAM, f"{found.subject}.{number}") for number in numbers]
        return [stored for stored in looked_up if stored is not None]

    def _settle_broken(self, error: Exception, request: DurableRequest, *_others: object) -> None:
        if request.stage is Stage.ENDING:  # a record of its id is there already
            self._acknowledge_broken(error, request)
        elif request.stage is not Stage.ENDED:
            self.fail(request, Outcome.FAILED, internal("the record of the request's id could not be read"))

    def _on_found(self, request: DurableRequest, found: StoredMessage, earlier: Sequence[StoredMessage]) -> None:
        self._begin(request)
        digest = found.headers.get("weir-digest", "")
        if digest and digest != request.body_digest():
            self._counters.conflict(request.model)
            self._refuse_namesake(request)
            return
        try:
            outcome = Outcome(found.headers.get("weir-outcome", ""))
        except ValueError:
            outcome = Outcome.SUCCEEDED
        if outcome is Outcome.CANCELLED:
            self._counters.end(request.model, outcome)  # its record was written by who cancelled it
        else:
            self._counters.conflict(request.model)
        for stored in earlier:
            block = pack_headers([*_as_written(stored.headers), ("Weir-Final", "false")])
            self._answer(request, stored.headers.get("weir-response", ""), block, stored.data, is_repeated=True)
        block = pack_headers([*_as_written(found.headers), ("Weir-Final", "true")])
        self._answer_last(request, outcome, found.headers.get("weir-ended-ms", ""), block, found.data, is_repeated=True)

    def _refuse_namesake(self, request: DurableRequest) -> None:
        """Another request has the same id: this one has no record, and its copy in DEAD tells of it."""
        error = WeirError(ErrorCode.ALREADY_EXISTS, f"another request with id '{request.id}' was accepted before")
        headers, body = encode_error(error, request.format)
        record = request.record(Outcome.DEAD_LETTERED, _CONFLICT_STATUS, time.time_ns() // 1_000_000)

        def buried() -> None:
            block = pack_headers([*record.headers(), *headers, ("Weir-Final", "true")])
            copy = f"refused {request.delivery.sequence}"
            self._answer_last(request, Outcome.DEAD_LETTERED, copy, block, body)

        self._dead.add(request, error.message, buried)


def _ttl(request: DurableRequest) -> Headers:
    return [("Nats-TTL", f"{request.terms.result_ttl_s}s")] if request.terms.result_ttl_s else []


def _as_written(headers: Mapping[str, str]) -> Headers:
    """A record's headers, their names as they are written in the contract: they were read in lower case."""
    told = [(name, value) for name, value in headers.items() if name not in _NOT_RECORDED]
    return [("-".join(part.capitalize() for part in name.split("-")), value) for name, value in told]


def _ignore(_ack: StoreAck) -> None:
    """A response before the last: one of an earlier run stands, and so does the answer to come."""

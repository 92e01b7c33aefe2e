"""`Recorder`: ends durable requests: stores the terminal record, sends the reply, then has the message acknowledged.

In this order a crash at any point causes at most one more execution. The first record of an id is final: a second
attempt to store one finds it, and replies with its content. A request that can't be executed is copied to stream DEAD
before its record is stored.

`RecordHeaderCache`: the header lines of the records of requests that succeeded in their first attempt. The part that
the records of a model have in common is packed once; the other lines need no escaping.

`DeadLetterWriter`: copies requests that can't be executed to stream DEAD: as they were sent, with the reason and the
history. They can be replayed: headers and body are the original ones, except for the headers of NATS itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import orjson

from weir.bus.naming import durable_subjects as subjects
from weir.bus.naming.subjects import token
from weir.bus.nats.connection import BROKER_ERRORS, Bus
from weir.bus.nats.headers import last_header, pack_headers
from weir.bus.nats.jetstream import JetStream, StoredMessage
from weir.bus.streams.acked_publisher import AckedPublisher, StoreAck
from weir.calls.inference.documents import digest_of, encode_error
from weir.durable.api.metrics import DurableCounters
from weir.durable.records.object_bodies import ObjectBodies
from weir.durable.records.record_store import RecordStore
from weir.durable.records.reply_outbox import ReplyOutbox
from weir.durable.requests.request import DurableRequest, Stage
from weir.runtime.containment import contained
from weir.schemas.core.errors import ErrorCode, WeirError, internal
from weir.schemas.kserve.response import error_body
from weir.schemas.wire.terminal import Outcome, TerminalRecord

logger = logging.getLogger("weir.gateway")


_VERSION_LINE = b"NATS/1.0\r\n"
_SPARE_BYTES = 1024  # for headers that are added later
_RETRY_S = 1.0
_LOOKUP_RETRY_S = 0.1  # requests behind it wait
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
    """Ends requests. `request.on_ended` is called when only the acknowledgement is left, which the request's owner
    sends.
    """

    def __init__(  # noqa: PLR0913 - the stores it writes to
        self,
        bus: Bus,
        publisher: AckedPublisher,
        api: JetStream,
        objects: ObjectBodies,
        counters: DurableCounters,
        outbox: ReplyOutbox,
        may_sync: Callable[[], bool] = lambda: True,
    ) -> None:
        self._bus = bus
        self._publisher = publisher
        self._api = api
        self._objects = objects
        self._outbox = outbox
        self._counters = counters
        self._records = RecordStore(bus, publisher, may_sync)
        self._header_cache = RecordHeaderCache()
        self._dead_letters = DeadLetterWriter(bus, publisher)
        self._background: asyncio.TaskGroup | None = None
        self._lookups = asyncio.Semaphore(_LOOKUPS_AT_A_TIME)
        self._ending = 0
        self._lookup_tasks: set[asyncio.Task[None]] = set()

    def start(self, background: asyncio.TaskGroup) -> None:
        """Looks up records in tasks of `background` from now on."""
        self._background = background

    def stop(self) -> None:
        """Cancels all lookups."""
        for task in self._lookup_tasks:
            task.cancel()

    def __len__(self) -> int:
        """Requests that are ending and have no stored record yet."""
        return self._ending

    def succeed(self, request: DurableRequest, headers: Headers, body: bytes, version: str) -> None:
        """Ends a request with its response, the last one if there are several."""
        block = self._header_cache.of_success(request, version, headers, time.time_ns() // 1_000_000)
        if block is None or len(block) + len(body) + _SPARE_BYTES > self._bus.max_payload_bytes:
            self._end(request, Outcome.SUCCEEDED, 200, headers, body, version)
            return
        self._store(request, Outcome.SUCCEEDED, block, body)

    @contained(on_error="_record_minimal")
    def fail(self, request: DurableRequest, outcome: Outcome, error: WeirError, status: int = 0) -> None:
        """Ends a request with an error."""
        headers, body = encode_error(error, request.format)
        self._end(request, outcome, status or error.http_status, headers, body)

    @contained(on_error="_record_minimal")
    def dead_letter(self, request: DurableRequest, error: WeirError) -> None:
        """Copies a request to DEAD, then ends it with the error."""
        self._mark_ending(request)
        on_added = partial(self.fail, request, Outcome.DEAD_LETTERED, error)
        self._dead_letters.add(request, error.message, on_added)

    def respond(self, request: DurableRequest, number: int, headers: Headers, body: bytes) -> None:
        """Publishes a response that is not the last one, and stores it under the request's id and this number."""
        headers_out = [("Weir-Id", request.id), ("Weir-Model", request.model), ("Weir-Response", str(number)), *headers]
        self._reply(request, str(number), pack_headers([*headers_out, ("Weir-Final", "false")]), body)
        if len(body) + _SPARE_BYTES * 4 <= self._bus.max_payload_bytes:
            subject = f"{subjects.result(request.model, request.id)}.{number}"
            lines = pack_headers([*headers_out, *_ttl(request)])[len(_VERSION_LINE) :]
            self._records.add(subject, lines, body, _ignore)

    def resolve(
        self,
        request: DurableRequest,
        on_none: Callable[[], None],
        on_found: Callable[[DurableRequest], None] | None = None,
    ) -> None:
        """Ends a request with the stored record of its id, after calling `on_found`; calls `on_none` if there is no
        record.
        """
        assert self._background is not None  # noqa: S101 - it was started
        task = self._background.create_task(self._look_up(request, on_none, on_found))
        self._lookup_tasks.add(task)
        task.add_done_callback(self._lookup_tasks.discard)

    # Unexpected exceptions

    def _record_minimal(self, _error: Exception, request: DurableRequest, *_others: object) -> None:
        """Records a failure with the fewest possible fields, so that nothing is left that could raise again."""
        now_ms = time.time_ns() // 1_000_000
        record = TerminalRecord(request.id, request.model, Outcome.FAILED, ended_ms=now_ms, status=500)
        lines = pack_headers([*record.headers(), ("Content-Type", "application/json")])[len(_VERSION_LINE) :]
        self._store(request, Outcome.FAILED, lines, error_body("unexpected error while the request was recorded"))

    def _on_unexpected_error(self, _error: Exception, request: DurableRequest, *_others: object) -> None:
        """Ends a request whose record could not be looked up, or that has one but could not be replied to."""
        if request.stage is Stage.ENDING:
            self._acknowledge(request, Outcome.DEAD_LETTERED)  # which keeps its object until that expires
        elif request.stage is not Stage.ENDED:
            self.fail(request, Outcome.FAILED, internal("the record of the request's id could not be read"))

    # Steps

    def _mark_ending(self, request: DurableRequest) -> None:
        if request.stage is not Stage.ENDING:
            request.stage = Stage.ENDING
            self._ending += 1

    def _end(  # noqa: PLR0913 - the parts of a record
        self, request: DurableRequest, outcome: Outcome, status: int, headers: Headers, body: bytes, version: str = ""
    ) -> None:
        record = request.record(outcome, status, time.time_ns() // 1_000_000)
        record.version = version
        record.model_digest = _model_digest(request, version)
        headers_out = record.headers()
        if request.responses:
            headers_out.append(("Weir-Responses", str(request.responses + (outcome is Outcome.SUCCEEDED))))
        headers_out += headers
        block = pack_headers(headers_out)[len(_VERSION_LINE) :]
        if len(block) + len(body) + _SPARE_BYTES > self._bus.max_payload_bytes:
            self._store_large(request, outcome, headers_out, body)
        else:
            self._store(request, outcome, block, body)

    def _store_large(self, request: DurableRequest, outcome: Outcome, headers_out: Headers, body: bytes) -> None:
        # A second execution writes an object of its own: the record that is final must not lose its object.
        name = f"{token(request.model)}.{token(request.id)}.{request.delivery.sequence}-{time.time_ns():x}"
        self._mark_ending(request)
        self._objects.put(name, body, partial(self._on_put, request, outcome, headers_out, name))

    def _on_put(
        self, request: DurableRequest, outcome: Outcome, headers_out: Headers, name: str, error: WeirError | None
    ) -> None:
        if error is not None:
            self.fail(request, Outcome.FAILED, error)
            return
        block = pack_headers([*headers_out, ("Weir-Object", name)])[len(_VERSION_LINE) :]
        self._store(request, outcome, block, b"")

    def _store(self, request: DurableRequest, outcome: Outcome, lines: bytes, body: bytes) -> None:
        stored = partial(self._on_stored, request, outcome, lines, body)
        subject = subjects.result(request.model, request.id)
        ttl_s = request.headers.result_ttl_s
        kept = b"Nats-TTL: %ds\r\n%b" % (ttl_s, lines) if ttl_s else lines
        self._mark_ending(request)
        self._records.add(subject, kept, body, stored)

    @contained(on_error="_on_unexpected_error")
    def _on_stored(self, request: DurableRequest, outcome: Outcome, lines: bytes, body: bytes, ack: StoreAck) -> None:
        if ack.is_stored:
            self._finish(request, outcome, lines, body)
        elif ack.is_conflict:
            self.resolve(request, partial(self._store, request, outcome, lines, body))
        else:
            logger.warning(
                "the record of a request to model %s was not stored: %s; retrying", request.model, ack.description
            )
            asyncio.get_running_loop().call_later(_RETRY_S, self._store, request, outcome, lines, body)

    def _finish(self, request: DurableRequest, outcome: Outcome, lines: bytes, body: bytes) -> None:
        self._counters.end(request.model, outcome)
        copy = last_header(b"\r\n" + lines, b"Weir-Ended-Ms") if request.headers.reply_to else ""
        block = _VERSION_LINE + b"Weir-Final: true\r\n" + lines
        self._reply(request, copy, block, body, partial(self._acknowledge, request, outcome))

    def _acknowledge(self, request: DurableRequest, outcome: Outcome) -> None:
        if request.stage is Stage.ENDED:
            return
        if request.stage is Stage.ENDING:
            self._ending -= 1
        request.stage = Stage.ENDED
        if request.headers.object_name and outcome is not Outcome.DEAD_LETTERED:
            self._objects.delete(request.headers.object_name)
        request.on_ended(request)

    def _reply(  # noqa: PLR0913 - the parts of a reply
        self,
        request: DurableRequest,
        copy: str,
        block: bytes,
        body: bytes,
        on_sent: Callable[[], None] = lambda: None,
        is_repeated: bool = False,
    ) -> None:
        """Sends a response; calls `on_sent` once it is delivered, or at once where the producer wants no reply.

        `copy` is the same for all copies of the response, and for no other one: the `Nats-Msg-Id` that is made of it has a
        stream on the reply subject store the response once.
        """
        if not request.headers.reply_to:
            on_sent()
            return
        name = digest_of(f"{request.model}\0{request.id}\0{copy}".encode(errors="replace"))
        block = b"%bNats-Msg-Id: %b\r\n%b" % (_VERSION_LINE, name.encode(), block[len(_VERSION_LINE) :])
        self._outbox.send(request.headers.reply_to, body, block, on_sent, is_repeated)

    @contained(on_error="_on_unexpected_error")
    async def _look_up(
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
            except BROKER_ERRORS:
                await asyncio.sleep(_LOOKUP_RETRY_S)
        if request.stage is Stage.ENDED:
            return
        if found is None:
            on_none()
            return
        if on_found is not None:
            if request.stage is Stage.ENDING:
                return  # its own record is being stored, and will conflict with this one
            on_found(request)
        self._on_found(request, found, earlier)

    async def _earlier_responses(self, request: DurableRequest, found: StoredMessage) -> list[StoredMessage]:
        """The stored responses before the last one, if the request has a reply subject."""
        text = found.headers.get("weir-responses", "")
        if not request.headers.reply_to or not (text.isascii() and text.isdigit() and len(text) < _MAX_COUNT_DIGITS):
            return []
        numbers = range(int(text))
        looked_up = [await self._api.last(subjects.RESULT_STREAM, f"{found.subject}.{number}") for number in numbers]
        return [stored for stored in looked_up if stored is not None]

    def _on_found(self, request: DurableRequest, found: StoredMessage, earlier: Sequence[StoredMessage]) -> None:
        self._mark_ending(request)
        digest = found.headers.get("weir-digest", "")
        if digest and digest != request.body_digest():
            self._counters.conflict(request.model)
            self._reject_duplicate_id(request)
            return
        try:
            outcome = Outcome(found.headers.get("weir-outcome", ""))
        except ValueError:
            outcome = Outcome.SUCCEEDED
        if outcome is Outcome.CANCELLED:
            self._counters.end(request.model, outcome)  # the record was stored by the cancellation
        else:
            self._counters.conflict(request.model)
        for stored in earlier:
            block = pack_headers([*_canonical_headers(stored.headers), ("Weir-Final", "false")])
            self._reply(request, stored.headers.get("weir-response", ""), block, stored.data, is_repeated=True)
        block = pack_headers([*_canonical_headers(found.headers), ("Weir-Final", "true")])
        copy, on_sent = found.headers.get("weir-ended-ms", ""), partial(self._acknowledge, request, outcome)
        self._reply(request, copy, block, found.data, on_sent, is_repeated=True)

    def _reject_duplicate_id(self, request: DurableRequest) -> None:
        """Rejects a request whose id belongs to another request: it has no record, only a copy in DEAD."""
        error = WeirError(ErrorCode.ALREADY_EXISTS, f"another request with id '{request.id}' was accepted before")
        headers, body = encode_error(error, request.format)
        record = request.record(Outcome.DEAD_LETTERED, _CONFLICT_STATUS, time.time_ns() // 1_000_000)

        def on_added() -> None:
            block = pack_headers([*record.headers(), *headers, ("Weir-Final", "true")])
            on_sent = partial(self._acknowledge, request, Outcome.DEAD_LETTERED)
            self._reply(request, f"refused {request.delivery.sequence}", block, body, on_sent)

        self._dead_letters.add(request, error.message, on_added)


def _ttl(request: DurableRequest) -> Headers:
    return [("Nats-TTL", f"{request.headers.result_ttl_s}s")] if request.headers.result_ttl_s else []


def _canonical_headers(headers: Mapping[str, str]) -> Headers:
    """A record's headers with their canonical names; they were read in lower case."""
    headers_out = [(name, value) for name, value in headers.items() if name not in _NOT_RECORDED]
    return [("-".join(part.capitalize() for part in name.split("-")), value) for name, value in headers_out]


def _ignore(_ack: StoreAck) -> None:
    """Ignores the acknowledgement of a response before the last one."""


MAX_KEPT = 256
"""Common parts that are cached."""


class RecordHeaderCache:
    """Packs the header lines of ordinary records."""

    def __init__(self) -> None:
        self._common: dict[tuple[str, tuple[str, str], str, tuple[tuple[str, str], ...]], bytes] = {}

    def of_success(self, request: DurableRequest, version: str, headers: Headers, ended_ms: int) -> bytes | None:
        """The lines of the record and of the response's `headers`, with the final empty line; the names are those of
        `TerminalRecord`. None for a request with several responses or failed attempts.
        """
        if request.responses or request.attempt_history.history:
            return None
        key = (request.model, (version, _model_digest(request, version)), request.headers.tenant, tuple(headers))
        common = self._common.get(key)
        if common is None:
            common = self._pack(*key)
        return (
            b"Weir-Id: %b\r\nWeir-Attempts: %d\r\nWeir-Accepted-Ms: %d\r\nWeir-Ended-Ms: %d\r\nWeir-Digest: %b\r\n%b"
            % (
                request.id.encode(errors="replace"),  # printable, as `check_id` has checked
                request.attempts,
                request.accepted_ms,
                ended_ms,
                request.body_digest().encode(),
                common,
            )
        )

    def _pack(self, model: str, ran: tuple[str, str], tenant: str, headers: tuple[tuple[str, str], ...]) -> bytes:
        version, digest = ran
        headers_out = [("Weir-Model", model), ("Weir-Outcome", Outcome.SUCCEEDED.value), ("Weir-Status", "200")]
        headers_out += [("Weir-Model-Version", version)] if version else []
        headers_out += [("Weir-Model-Digest", digest)] if digest else []
        headers_out += [("Weir-Tenant", tenant)] if tenant else []
        if len(self._common) >= MAX_KEPT:
            self._common.clear()
        key = (model, ran, tenant, headers)
        lines = self._common[key] = pack_headers([*headers_out, *headers])[len(_VERSION_LINE) :]
        return lines


def _model_digest(request: DurableRequest, version: str) -> str:
    return "" if request.served is None else request.served.digest(version)


_DEAD_LETTER_RETRY_S = 1.0
_MAX_REASON_LENGTH = 1024
_DEAD_LETTER_SPARE_BYTES = 256


class DeadLetterWriter:
    """Stores dead letters, and retries until the broker has stored them."""

    def __init__(self, bus: Bus, publisher: AckedPublisher) -> None:
        self._bus = bus
        self._publisher = publisher

    def add(self, request: DurableRequest, reason: str, on_added: Callable[[], None]) -> None:
        """Stores a copy of a request; `on_added` is called when it is stored."""
        # A replayed request has the id of its first dead letter, and may become one again soon after.
        name = f"dead-{request.id}-{request.delivery.sequence}"
        headers_out = [
            ("Nats-Msg-Id", name),
            ("Weir-Dead-Reason", reason[:_MAX_REASON_LENGTH]),
            ("Weir-Dead-Subject", request.message.subject),
            ("Weir-Dead-Id", request.id),
            ("Weir-Dead-Ms", str(time.time_ns() // 1_000_000)),
            ("Weir-Attempts", str(request.attempts)),
        ]
        history = [(a.ended_ms, a.reason[:200]) for a in request.attempt_history.history]
        original = original_lines(request.message.header_block)
        block = pack_headers([*headers_out, ("Weir-History", orjson.dumps(history).decode())])[:-2] + original
        data = request.message.data
        if len(block) + len(data) + _DEAD_LETTER_SPARE_BYTES > self._bus.max_payload_bytes:
            # The message is nearly as large as the limit: the history is left out.
            headers_out[1] = ("Weir-Dead-Reason", reason[:_DEAD_LETTER_SPARE_BYTES])
            block = pack_headers(headers_out)[:-2] + original
        if len(block) + len(data) > self._bus.max_payload_bytes:
            data = b""
            block = (
                pack_headers([*headers_out, ("Weir-Dead-Truncated", str(len(request.message.data)))])[:-2] + original
            )
            logger.warning(
                "a dead letter of model %s is stored without its body, which would exceed the size limit", request.model
            )
        self._store(subjects.dead(request.model), data, block, on_added)

    def _store(self, subject: str, data: bytes, block: bytes, on_added: Callable[[], None]) -> None:
        def stored(ack: StoreAck) -> None:
            if ack.is_stored:
                on_added()
                return
            logger.warning("a dead letter was not stored: %s; retrying", ack.description)
            asyncio.get_running_loop().call_later(_DEAD_LETTER_RETRY_S, self._store, subject, data, block, on_added)

        self._publisher.publish(subject, data, block, stored)


def original_lines(block: bytes) -> bytes:
    """The original header lines, to be appended to others, with the final empty line.

    Headers for the stream that stored the message are left out.
    """
    lines = block.split(b"\r\n")[1:]
    kept = [line for line in lines if line and not line.lower().startswith((b"nats-", b"weir-dead-"))]
    return b"".join(line + b"\r\n" for line in kept) + b"\r\n"

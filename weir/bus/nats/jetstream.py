"""`JetStream`: the client of JetStream's API, on the connection of a `Bus`.

Administration (streams, consumers, key-value buckets, writing objects) is nats-py's `JetStreamContext`, which gets a
connection that sends its requests on the bus. Reading single messages and whole streams is done here, without nats-py's
task and queue for each message.

When a server of a cluster is lost, the streams and consumers that it led, and the API itself if it led that, do not respond
for some seconds (an election takes 4 to 9 s; nats-server reports no responders, or nothing). Requests are repeated
meanwhile. The lost one may have been carried out, so every request may be carried out twice.
Source: the JetStream API; ADR-31 (direct get: `last_by_subj`, `next_by_subj`, and `multi_last` with wildcards); errors 503,
10008 and 10023; `$JS.ACK.<stream>.<consumer>.<delivered>.<stream sequence>.<consumer sequence>.<timestamp>.<pending>`, with
domain and account before the stream in the newer form.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import weir.bus.nats.nats_py  # noqa: F401  # isort: skip  # ahead of all that imports nats-py
import msgspec
import orjson
from nats.aio.client import ServerVersion
from nats.errors import NoRespondersError
from nats.js import JetStreamContext
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError
from nats.nuid import NUID

from weir.bus.message import Message
from weir.bus.nats.headers import header_rows, last_header, pack_headers, parse_headers
from weir.bus.nats.replies import ReplyInbox

if TYPE_CHECKING:
    from weir.bus.nats.connection import Bus

API_TIMEOUT_S = 5.0
"""Timeout of a request to JetStream."""

RETRY_FOR_S = 15.0
"""How long a request to a cluster without a leader is repeated."""

TRY_S = 1.0
"""Timeout of one try in a cluster: a former leader does not respond, and the next one will."""

RESEND_S = 0.25
"""In a cluster a request is sent again after so long, within one try: while there is no leader nothing receives it."""

EXPECTED_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
"""The header of a conditional write: the sequence of the last message on its subject, 0 for none."""

WRONG_LAST_SEQUENCE = (10071, 10164)
"""JetStream's error codes for a conditional write whose expected sequence is not the last one."""

MAX_ROWS = 100_000
"""Rows of a listing of streams or consumers that are read."""

_RETRY_WAIT_S = 0.1
_READ_RETRY_WAIT_S = 0.05  # no stream responds: it is being created, or its server restarts
_SCAN_HEARTBEAT_S = 1.0
_LAST_DELIVERED, _STALLED = b"Nats-Last-Consumer", b"Nats-Consumer-Stalled"
_NO_MESSAGE = (10037, 10043, 10057)
_OLD_ACK_TOKENS = 9
_NEW_ACK_TOKENS = 11


class StoredMessage(NamedTuple):
    """A message of a stream. `headers` have lower-case names, `header_block` is their encoded form; `stored_ms` is unix
    time.
    """

    subject: str
    sequence: int
    stored_ms: int
    headers: dict[str, str]
    header_block: bytes
    data: bytes


class StreamState(NamedTuple):
    """How many messages a stream holds, the sequence of the last message it received, and how many consumers it has."""

    messages: int
    last_sequence: int
    consumers: int


class DeliveryInfo(msgspec.Struct, frozen=True, gc=False):
    """How often a message was delivered, its sequence, when it was stored, and how many messages are still to come.

    `number` counts the deliveries of the consumer, from 1 on: a gap in it is a delivery that was lost.
    """

    deliveries: int
    sequence: int
    stored_ns: int
    pending: int
    number: int = 0


def is_transient(error: Exception) -> bool:
    """Whether an error may pass within seconds, because a cluster is electing a leader."""
    if isinstance(error, APIError):
        return error.code == 503 or isinstance(error, ServiceUnavailableError)
    return isinstance(error, TimeoutError | NoRespondersError)


class JetStream(JetStreamContext):
    """JetStream's API for one role. All methods raise NatsError, OSError or TimeoutError while the broker is away."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.replies = ReplyInbox(bus, f"{bus.inbox_prefix}.{NUID().next().decode()}")
        super().__init__(_Connection(self), timeout=API_TIMEOUT_S)  # type: ignore[arg-type]  # all that it needs of one

    @property
    def server_version(self) -> str:
        """The version of nats-server, "0.0.0" while it is away."""
        return str(self._bus.server_info.get("version", "0.0.0"))

    async def start(self) -> None:
        """Subscribes to the responses. Requests under way fail when the connection is lost."""
        await self.replies.start()
        self._bus.on_loss(self.replies.fail_all)

    async def ask(
        self, operation: str, question: Mapping[str, Any] | None = None, once_s: float | None = None
    ) -> dict[str, Any]:
        """The response to the API request `$JS.API.<operation>`. With `once_s` it is sent once, and the
        response is awaited for `once_s` seconds.

        Raises APIError for a request that JetStream rejects, NoRespondersError where it does not run, ConnectionError for a
        response that is not JSON.
        """
        data = b"" if question is None else orjson.dumps(question)
        timeout_s = API_TIMEOUT_S if once_s is None else once_s
        message = await self.exchange(f"$JS.API.{operation}", data, timeout_s, is_repeated=once_s is None)
        try:
            response: dict[str, Any] = orjson.loads(message.data)
        except ValueError as error:
            raise ConnectionError(f"JetStream's response to {operation} is not JSON") from error
        if "error" in response:
            raise APIError.from_error(response["error"])
        return response

    async def exchange(
        self, subject: str, data: bytes, timeout_s: float, header_block: bytes = b"", is_repeated: bool = True
    ) -> Message:
        """The response to one request, or to a message that a stream stores.

        In a cluster it is repeated, unless `is_repeated` is False, while nothing responds; a message that may have been
        stored is not. Raises NoRespondersError where nothing listens on `subject`.
        """
        is_api = subject.startswith("$JS.API.")
        until_s = time.monotonic() + RETRY_FOR_S if is_repeated and self._bus.is_clustered else 0.0
        try_s = min(timeout_s, TRY_S) if until_s and is_api else timeout_s
        while True:
            is_last = time.monotonic() >= until_s
            try:
                message = await self.replies.request(
                    subject,
                    data,
                    timeout_s=try_s,
                    header_block=header_block,
                    resend_s=RESEND_S if until_s and is_api else None,
                )
            except TimeoutError:
                if is_last or not is_api:
                    raise
            else:
                if message.status != "503" and not (is_api and _is_leaderless(message)):
                    return message
                if is_last and message.status == "503":
                    raise NoRespondersError
                if is_last:
                    return message
            await asyncio.sleep(_RETRY_WAIT_S)

    # Streams and consumers

    async def stream_state(self, stream: str) -> StreamState:
        """Raises NotFoundError where there is no such stream."""
        state = (await self.ask(f"STREAM.INFO.{stream}"))["state"]
        return StreamState(int(state["messages"]), int(state["last_seq"]), int(state["consumer_count"]))

    async def find_stream(self, stream: str, subjects_filter: str = "") -> dict[str, Any] | None:
        """What JetStream says about a stream (`config`, `created`, `state`), None where there is no such stream.

        With `subjects_filter` the state has the number of messages of each subject that matches, of a first page of them.
        """
        question = {"subjects_filter": subjects_filter} if subjects_filter else None
        try:
            return await self.ask(f"STREAM.INFO.{stream}", question)
        except NotFoundError:
            return None

    async def subject_counts(self, stream: str, filter: str) -> dict[str, int]:
        """The number of messages on each subject that `filter` matches."""
        counts: dict[str, int] = {}
        while True:
            response = await self.ask(f"STREAM.INFO.{stream}", {"subjects_filter": filter, "offset": len(counts)})
            page = response["state"].get("subjects") or {}
            counts.update(page)
            if not page or len(counts) >= int(response.get("total", 0)):
                return counts

    async def list_all(self, operation: str, field: str, limit: int = MAX_ROWS) -> list[Any]:
        """The rows of a paged listing, such as ("STREAM.LIST", "streams") or ("CONSUMER.NAMES.QUEUE", "consumers").

        No page is requested once there are `limit` rows.
        """
        rows: list[Any] = []
        while len(rows) < limit:
            response = await self.ask(operation, {"offset": len(rows)})
            page = response.get(field) or []
            rows += page
            if not page or len(rows) >= int(response.get("total", 0)):
                break
        return rows

    async def purge(self, stream: str, filter: str, below: int = 0) -> None:
        """Removes the messages on subjects that `filter` matches; with `below` those of smaller sequences only."""
        await self.ask(f"STREAM.PURGE.{stream}", {"filter": filter, **({"seq": below} if below else {})})

    async def delete(self, stream: str, sequence: int) -> None:
        """Removes a message, if it exists."""
        try:
            await self.ask(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": True})
        except APIError as error:
            if error.err_code not in _NO_MESSAGE:
                raise

    # Messages

    async def last(self, stream: str, *filters: str) -> StoredMessage | None:
        """The newest message on any of these subjects, which may have wildcards. Any replica of the stream responds.

        Waits up to API_TIMEOUT_S for a stream that does not exist yet. Raises ConnectionError for a malformed response.
        """
        if len(filters) > 1 or "*" in filters[0]:
            return await self._read(stream, {"multi_last": filters})
        return await self._read(stream, {"last_by_subj": filters[0]})

    async def next(self, stream: str, filter: str, sequence: int = 1) -> StoredMessage | None:
        """The oldest message from `sequence` on, on subjects that `filter` matches. Otherwise as `last`."""
        return await self._read(stream, {"seq": sequence, "next_by_subj": filter})

    async def stored(self, stream: str, *, subject: str = "", sequence: int = 0) -> StoredMessage | None:
        """The last message on `subject`, or the one of this sequence, as the stream's leader has it; None without one.

        Raises NotFoundError where there is no such stream.
        """
        question: dict[str, Any] = {"last_by_subj": subject} if subject else {"seq": sequence}
        try:
            row = (await self.ask(f"STREAM.MSG.GET.{stream}", question))["message"]
        except APIError as error:
            if error.err_code in _NO_MESSAGE:
                return None
            raise
        block = base64.b64decode(row.get("hdrs") or b"")
        return StoredMessage(
            str(row["subject"]),
            int(row["seq"]),
            int(datetime.fromisoformat(row["time"]).timestamp() * 1000),
            parse_headers(block),
            block,
            base64.b64decode(row.get("data") or b""),
        )

    async def scan(
        self, stream: str, filter: str, *, start: int | None = None, headers_only: bool = False
    ) -> AsyncGenerator[StoredMessage, None]:
        """The messages on subjects that `filter` matches, oldest first, up to the last one stored when it is called.

        From sequence `start` on; without it the last message of each subject. The stream's leader responds. With
        `headers_only` their `data` is empty and header `Nats-Msg-Size` has its length. Raises NotFoundError where there
        is no such stream, ConnectionError where the connection is lost meanwhile.
        """
        losses = self._bus.losses
        arrived: asyncio.Queue[Message] = asyncio.Queue()
        inbox = f"{self._bus.inbox_prefix}.{NUID().next().decode()}"
        unsubscribe = await self._bus.subscribe(inbox, arrived.put_nowait)
        try:
            config = {
                "deliver_subject": inbox,
                "filter_subject": filter,
                "deliver_policy": "last_per_subject" if start is None else "by_start_sequence",
                "ack_policy": "none",
                "replay_policy": "instant",
                "headers_only": headers_only,
                "max_deliver": 1,
                "mem_storage": True,
                "num_replicas": 1,
                "flow_control": True,
                "idle_heartbeat": int(_SCAN_HEARTBEAT_S * 1e9),
                **({} if start is None else {"opt_start_seq": max(1, start)}),
            }
            created = await self.ask(f"CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": config})
            pending, delivered = int(created.get("num_pending", 0)), 0
            while pending > 0:
                async with asyncio.timeout(API_TIMEOUT_S):
                    message = await arrived.get()
                if self._bus.losses != losses:
                    raise ConnectionError("the connection to nats-server was lost while a stream was read")
                if message.status:
                    # It has a subject where JetStream waits until what it sent has arrived; else nothing more is to come.
                    awaited = message.reply or last_header(message.header_block, _STALLED)
                    if awaited:
                        self._bus.publish(awaited, b"")
                    elif last_header(message.header_block, _LAST_DELIVERED) == str(delivered):
                        return
                    else:
                        raise ConnectionError("messages of a stream were lost on their way")
                    continue
                delivery = parse_ack_subject(message.reply)
                if delivery is None:
                    raise ConnectionError("a message of JetStream has no acknowledgement subject")
                delivered += 1
                pending = min(pending - 1, delivery.pending)  # messages may be removed meanwhile
                yield StoredMessage(
                    message.subject,
                    delivery.sequence,
                    delivery.stored_ns // 1_000_000,
                    parse_headers(message.header_block),
                    message.header_block,
                    message.data,
                )
        finally:
            unsubscribe()

    async def pull_one(self, stream: str, consumer: str, wait_s: float) -> Message | None:
        """The next message of a durable consumer, None without one in `wait_s`. Acknowledge it on its `reply`."""
        if not self._bus.is_connected:  # which drops requests for messages
            raise ConnectionError("the broker is away")
        arrived: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        # A message keeps its own subject when it is delivered: only the subscription identifies the request.
        inbox = f"{self._bus.inbox_prefix}.{NUID().next().decode()}"
        unsubscribe = await self._bus.subscribe(inbox, lambda m: None if arrived.done() else arrived.set_result(m))
        try:
            request = orjson.dumps({"batch": 1, "expires": int(wait_s * 1e9)})
            self._bus.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", request, inbox)
            message = await self.replies.wait(arrived, wait_s + API_TIMEOUT_S)
        finally:
            unsubscribe()
        if message.status in ("404", "408"):
            return None
        if message.status:
            raise ConnectionError(f"consumer {consumer} of stream {stream} ended the request: status {message.status}")
        return message

    async def _read(self, stream: str, question: Mapping[str, Any]) -> StoredMessage | None:
        until_s = time.monotonic() + API_TIMEOUT_S
        data = orjson.dumps(question)
        is_multiple = "multi_last" in question
        while True:
            messages: list[Message] = []

            def take(message: Message, messages: list[Message] = messages) -> bool:
                messages.append(message)
                return bool(message.status) or not is_multiple

            try:
                left_s = max(until_s - time.monotonic(), 0.0)
                # Any replica responds. A server of a cluster that was just lost may have been chosen; the next try finds
                # another one.
                try_s = min(left_s, TRY_S) if self._bus.is_clustered else left_s
                if not await self.replies.gather([f"$JS.API.DIRECT.GET.{stream}"], data, take, timeout_s=try_s):
                    if time.monotonic() < until_s:
                        continue
                    raise TimeoutError(
                        f"JetStream did not respond to a read of stream {stream} in {API_TIMEOUT_S:.0f} s"
                    )
                status = messages[-1].status
            except ConnectionError:
                continue  # the bus keeps the next request until it is connected again
            if status != "503":
                break
            await asyncio.sleep(_READ_RETRY_WAIT_S)
        if status not in ("", "204", "404"):
            raise ConnectionError(f"JetStream could not read stream {stream}: status {status}")
        try:
            found = [_direct_message(message) for message in messages if not message.status]
        except ValueError as error:
            raise ConnectionError(f"JetStream's response can't be read: {error}") from error
        return max(found, key=lambda message: message.sequence, default=None)


class _Connection:
    """What nats-py's JetStreamContext and ObjectStore need of a connection."""

    def __init__(self, jetstream: JetStream) -> None:
        self._jetstream = jetstream
        self._nuid = NUID()

    @property
    def connected_server_version(self) -> ServerVersion:
        return ServerVersion(str(self._jetstream.server_version))

    async def request(
        self, subject: str, payload: bytes = b"", timeout: float = API_TIMEOUT_S, headers: dict[str, str] | None = None
    ) -> _Response:
        # nats-py names some headers by members of an enumeration.
        rows = [(str(getattr(name, "value", name)), value) for name, value in (headers or {}).items()]
        block = pack_headers(rows) if rows else b""
        message = await self._jetstream.exchange(subject, bytes(payload), timeout, block)
        return _Response(message.data, dict(header_rows(message.header_block)), message.status)


class _Response:
    """A response as nats-py reads it, which changes `data`."""

    def __init__(self, data: bytes | None, headers: dict[str, str], status: str) -> None:
        self.data = data
        self.headers = {**headers, "Status": status} if status else headers


def parse_ack_subject(subject: str) -> DeliveryInfo | None:
    """What the subject for the acknowledgement of a message says about it; None for any other subject."""
    tokens = subject.split(".")
    if len(tokens) == _OLD_ACK_TOKENS:
        first = 4
    elif len(tokens) >= _NEW_ACK_TOKENS:
        first = 6
    else:
        return None
    try:
        deliveries, sequence, number, stored_ns, pending = map(int, tokens[first : first + 5])
    except ValueError:
        return None
    return DeliveryInfo(deliveries, sequence, stored_ns, pending, number)


def _is_leaderless(message: Message) -> bool:
    """Whether the API responds that it has no leader just now. A direct get has headers: its data is a message's."""
    return not message.header_block and b'"error":{"code":503' in message.data[:512]


def _direct_message(message: Message) -> StoredMessage:
    """The message in the response to a direct get. Raises ValueError."""
    block = message.header_block
    stored = datetime.fromisoformat(last_header(block, b"Nats-Time-Stamp"))
    return StoredMessage(
        last_header(block, b"Nats-Subject"),
        int(last_header(block, b"Nats-Sequence")),
        int(stored.timestamp() * 1000),
        parse_headers(block),
        block,
        message.data,
    )

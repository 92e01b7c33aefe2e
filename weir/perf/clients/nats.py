"""`NatsClient`: requests on `infer.<model>`, and their responses on reply subjects."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence

from weir.bus.message import Message
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus
from weir.bus.nats.headers import pack_headers, parse_headers
from weir.bus.nats.replies import ReplyInbox
from weir.perf.clients.bodies import infer_body
from weir.perf.clients.session import Answer, CallFailed, SampleRequest
from weir.perf.load.sequences import SequenceStep
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START

_MAX_HEADER_BYTES = 1024


class NatsClient:
    """Publishes requests for a model on a connected bus; all sessions share it.

    A request that takes longer than `timeout_s` has failed. `headers` are sent with each. `start` comes first.
    """

    def __init__(
        self, bus: Bus, model: str, version: str, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> None:
        self.bus = bus
        self.timeout_s = timeout_s
        self._headers = dict(headers or {})
        self.subject = f"infer.{subjects.token(model)}" + (f".v{version}" if version else "")
        # Gateways reply to producers below _INBOX only.
        self.inbox = ReplyInbox(bus, f"_INBOX.{secrets.token_hex(11)}")
        self._samples: list[tuple[bytes, dict[str, str], bytes]] = []

    async def start(self) -> None:
        """Subscribes to the reply subjects."""
        await self.inbox.start()

    def load(self, samples: Sequence[SampleRequest]) -> None:
        """Encodes the samples. Raises ValueError for one that is larger than the broker's messages may be."""
        self._samples = []
        for sample in samples:
            chunks, header_length = infer_body(sample)
            body = b"".join(chunks)
            if len(body) + _MAX_HEADER_BYTES + len(pack_headers(self._headers)) > self.bus.max_payload_bytes:
                raise ValueError(
                    f"a request of {len(body)} bytes does not fit into a message of NATS, which may have "
                    f"{self.bus.max_payload_bytes} bytes"
                )
            headers = {**self._headers, "Inference-Header-Content-Length": str(header_length)}
            self._samples.append((body, headers, pack_headers(headers)))

    def message(self, sample: int, step: SequenceStep | None) -> tuple[bytes, bytes]:
        """The body and the encoded headers of a message."""
        body, headers, block = self._samples[sample]
        if step is None:
            return body, block
        more = {
            "Weir-Sequence-Id": str(step.correlation_id),
            "Weir-Sequence-Start": str(bool(step.flags & SEQUENCE_START)).lower(),
            "Weir-Sequence-End": str(bool(step.flags & SEQUENCE_END)).lower(),
        }
        return body, pack_headers(headers | more)

    def session(self) -> NatsSession:
        """A session on the shared connection."""
        return NatsSession(self)

    async def close(self) -> None:
        """Does nothing: the connection belongs to the caller."""


class NatsSession:
    """Requests one after the other."""

    def __init__(self, client: NatsClient) -> None:
        self._client = client

    async def infer(self, sample: int, step: SequenceStep | None) -> Answer:
        """Publishes one request and waits for the response that is marked as final. Raises CallFailed."""
        client = self._client
        collected = _Collected(asyncio.get_running_loop().create_future())
        body, headers = client.message(sample, step)
        reply = client.inbox.expect(collected.on_message)
        try:
            client.bus.publish(client.subject, body, reply, headers)
            async with asyncio.timeout(client.timeout_s):
                await collected.end
        except TimeoutError:
            raise CallFailed(f"no final response within {client.timeout_s:g} s") from None
        finally:
            client.inbox.forget(reply)
        return Answer(collected.responses_s, collected.end_s)

    async def close(self) -> None:
        """Does nothing: the connection is shared."""


class _Collected:
    """The responses of one request; `end` is done with the last one, or with the error."""

    def __init__(self, end: asyncio.Future[None]) -> None:
        self.end = end
        self.end_s = 0.0
        self.responses_s: list[float] = []

    def on_message(self, message: Message) -> None:
        now_s = time.perf_counter()
        if self.end.done():
            return
        if message.status == "503":
            self.end.set_exception(CallFailed("no gateway serves requests over NATS", is_connection=True))
            return
        headers = parse_headers(message.header_block)
        error = headers.get("nats-service-error")
        if error is not None or headers.get("weir-outcome") not in ("succeeded", None):
            self.end.set_exception(CallFailed(error or f"the request {headers['weir-outcome']}"))
            return
        is_final = headers.get("weir-final") != "false"
        if message.data or not is_final:
            self.responses_s.append(now_s)
        if is_final:
            self.end_s = now_s
            self.end.set_result(None)

"""The stores of the response cache: `LocalCache` in a process's memory, and `SharedCache` in a bucket of the broker's
memory.

Both store `CachedResponse`s by key. All gateways and workers share the bucket. A lookup there is one request to the
broker with a short timeout: without a reply in time, the cache has no response. Insertions are not acknowledged. A full
bucket drops its oldest entries.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import NamedTuple

from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus, Message
from weir.bus.streams.declarations import ensure_response_cache
from weir.runtime.log_limiter import LogLimiter
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferResponse, Parameters
from weir.schemas.core.tensors import Tensor
from weir.schemas.wire.calls import pack_response, pack_responses, unpack_responses
from weir.schemas.wire.codec import MalformedMessage

logger = logging.getLogger("weir.calls")

_limited = LogLimiter(logger)

LOOKUP_TIMEOUT_S = 0.25
"""How long a request waits for the shared cache."""

_HEADERS_BYTES = 4096  # for the subject and headers of a message beside the response
_ENTRY_BYTES = 256
_OUTPUT_BYTES = 192
"""Memory of an entry, and of an output, beside names, parameters and content: measured, and rounded up."""


class CachedOutput(NamedTuple):
    """An output, with its content."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


class CachedResponse(NamedTuple):
    """The outputs and response parameters of a response of `version` of a model."""

    version: int
    outputs: tuple[CachedOutput, ...]
    parameters: Parameters | None

    @property
    def size_bytes(self) -> int:
        """The approximate memory that the entry takes up."""
        parameters = len(repr(self.parameters)) if self.parameters else 0
        outputs = sum(_OUTPUT_BYTES + len(o.name) + 8 * len(o.shape) + len(o.data) for o in self.outputs)
        return _ENTRY_BYTES + parameters + outputs

    def response(self, model: str, id: str) -> InferResponse:
        """The response to another request of the same content; outputs are not copied."""
        outputs = [Tensor(o.name, o.datatype, o.shape, o.data) for o in self.outputs]
        parameters = None if self.parameters is None else dict(self.parameters)
        return InferResponse(model, str(self.version), id, outputs, parameters)

    def pack(self) -> bytes:
        """The form in the shared cache: a responses message with one response."""
        outputs = (Tensor(o.name, o.datatype, o.shape, o.data) for o in self.outputs)
        return pack_responses(self.version, [pack_response(0, outputs, self.parameters)])

    @classmethod
    def unpack(cls, data: bytes) -> CachedResponse:
        """The response that was packed. Raises MalformedMessage."""
        version, responses = unpack_responses(data)
        if len(responses) != 1 or responses[0].outputs is None or responses[0].error is not None:
            raise MalformedMessage("not a cached response")
        outputs = []
        for tensor in responses[0].outputs:
            if not isinstance(tensor.data, bytes):
                raise MalformedMessage("not a cached response: its content lies in a payload slot")
            outputs.append(CachedOutput(tensor.name, tensor.datatype, tuple(tensor.shape), tensor.data))
        return cls(version, tuple(outputs), responses[0].parameters)


class LocalCache:
    """Responses of at most `size_bytes` together. When it is full, the least recently used ones are dropped."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._responses: OrderedDict[bytes, CachedResponse] = OrderedDict()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def find(self, key: bytes) -> CachedResponse | None:
        """The response, which counts as used now."""
        response = self._responses.get(key)
        if response is not None:
            self._responses.move_to_end(key)
        return response

    def insert(self, key: bytes, response: CachedResponse) -> bool:
        """Stores a response, replacing an earlier one; False when it is larger than the whole cache."""
        size_bytes = response.size_bytes
        if size_bytes > self._size_bytes:
            return False
        earlier = self._responses.pop(key, None)
        if earlier is not None:
            self.used_bytes -= earlier.size_bytes
        while self.used_bytes + size_bytes > self._size_bytes:
            _, oldest = self._responses.popitem(last=False)
            self.used_bytes -= oldest.size_bytes
        self._responses[key] = response
        self.used_bytes += size_bytes
        return True


OnFound = Callable[[CachedResponse | None], None]


class SharedCache:
    """Responses in the bucket. `malformed_messages` counts entries that could not be decoded."""

    def __init__(self, bus: Bus, caller_id: str, size_bytes: int, ttl_s: float) -> None:
        self._bus = bus
        self._subject = subjects.cache_replies(caller_id)
        self._size_bytes = size_bytes
        self._ttl_s = ttl_s
        self._numbers = count(1)
        self._waiting: dict[str, tuple[OnFound, asyncio.TimerHandle]] = {}
        self.malformed_messages = 0

    async def start(self) -> None:
        """Creates the bucket, now and after each reconnection. Raises WeirError when the broker has no room for it."""
        await ensure_response_cache(self._bus, self._size_bytes, self._ttl_s)
        await self._bus.subscribe(f"{self._subject}.*", self._on_reply)
        self._bus.on_reconnect(self._recover)

    def find(self, key: bytes, on_found: OnFound) -> None:
        """Calls `on_found` later, once, with the response of this key or None."""
        loop = asyncio.get_running_loop()
        if not self._bus.is_connected:
            loop.call_soon(on_found, None)
            return
        subject = f"{self._subject}.{next(self._numbers)}"
        self._waiting[subject] = on_found, loop.call_later(LOOKUP_TIMEOUT_S, partial(self._found, subject, None))
        self._bus.publish(subjects.cache_read(key.hex()), b"", subject)

    def insert(self, key: bytes, response: CachedResponse) -> bool:
        """Stores a response, replacing an earlier one; False when it is too large for a message or the bucket."""
        if response.size_bytes > min(self._bus.max_payload_bytes - _HEADERS_BYTES, self._size_bytes):
            return False
        if self._bus.is_connected:
            self._bus.publish(subjects.cached(key.hex()), response.pack())
        return True

    async def _recover(self) -> None:
        try:
            await ensure_response_cache(self._bus, self._size_bytes, self._ttl_s)
        except WeirError as error:
            logger.warning("the response cache could not be created, so requests run without it: %s", error.message)

    def _on_reply(self, message: Message) -> None:
        response = None
        if not message.status:  # a status means that the entry, or the bucket, does not exist
            try:
                response = CachedResponse.unpack(message.data)
            except MalformedMessage as error:
                self.malformed_messages += 1
                _limited.warning("malformed entry", "ignored a malformed entry of the response cache: %s", error)
        self._found(message.subject, response)

    def _found(self, subject: str, response: CachedResponse | None) -> None:
        waiting = self._waiting.pop(subject, None)
        if waiting is not None:
            on_found, timer = waiting
            timer.cancel()
            on_found(response)

"""The gRPC front door: Triton's `inference.GRPCInferenceService`, the standard health check, and reflection.

Promises: a request is refused at the door with Triton's code and wording, a call its client gives up is abandoned, and
calls that are open when the server stops get the time they were promised.

It stands on an HTTP/2 of our own, whose connections hand over all calls of one read in one turn of the event loop, so that
they share frames on the bus. Measured with h2load, 64 calls in flight, for a 64-byte tensor, CPU of the server a call:
30 us, or 50 for a request whose header is new, where grpc.aio took 410 to 520 on the same loaded machine.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from typing import Any

from gateway.doors import Doors
from gateway.grpc.call import GrpcCall, UnaryCall
from gateway.grpc.head import CallHead
from gateway.grpc.infer_methods import infer_methods
from gateway.grpc.infer_requests import InferRequests
from gateway.grpc.later_calls import LaterCalls
from gateway.grpc.messages import Message
from gateway.grpc.metadata_methods import metadata_methods
from gateway.grpc.options import GrpcOptions
from gateway.grpc.reflection_methods import reflection_methods
from gateway.grpc.repository_methods import repository_methods
from gateway.grpc.rpc import Handler, Methods, Streaming
from gateway.grpc.settings_methods import settings_methods
from gateway.grpc.shared_memory_methods import shared_memory_methods
from gateway.grpc.statistics_methods import statistics_methods
from gateway.grpc.status import CallError, Status, shutting_down
from gateway.grpc.stream_call import Conversation, StreamCall
from gateway.grpc.stream_methods import stream_methods
from gateway.http2.headers import RequestHead
from gateway.http2.lifetime import GREETING_TIME_S
from gateway.http2.protocol import Http2Protocol
from gateway.http2.stream import Stream
from runtime.containment import report
from schemas.errors import WeirError

logger = logging.getLogger("weir.gateway")

_BACKLOG = 2048
_POLL_S = 0.01
_LAST_WORDS_S = 1.0


class GrpcServer:
    """One gRPC server on one port, on the running event loop. It is the `Application` of its connections."""

    def __init__(self, doors: Doors, options: GrpcOptions | None = None) -> None:
        self._access = doors.access
        self._readiness = doors.readiness
        self.ledger = doors.ledger
        self._options = options or GrpcOptions()
        self._handlers = self._make_handlers(doors, self._options.compression_level)
        self._listener: asyncio.Server | None = None
        self._connections: set[Http2Protocol] = set()
        self._open_calls: set[GrpcCall] = set()
        self._is_stopping = False

    async def start(self, address: str, port: int) -> int:
        """Listens on `address` and `port` (0: a free one) and returns the port. Raises OSError when it can't."""
        tls = self._options.tls_context()
        is_v6 = ":" in address
        try:
            listener = socket.create_server(
                (address, port),
                family=socket.AF_INET6 if is_v6 else socket.AF_INET,
                backlog=_BACKLOG,
                reuse_port=self._options.reuse_port,
                dualstack_ipv6=address == "::" and socket.has_dualstack_ipv6(),
            )
        except OSError as error:
            host = f"[{address}]" if is_v6 else address
            raise OSError(f"gRPC can't listen on {host}:{port}: is the port taken?") from error
        make_protocol = partial(Http2Protocol, self, self._options.http2(), self._connections, self.ledger)
        self._listener = await asyncio.get_running_loop().create_server(
            make_protocol,
            sock=listener,
            backlog=_BACKLOG,
            ssl=tls,
            ssl_handshake_timeout=GREETING_TIME_S if tls else None,
        )
        return int(listener.getsockname()[1])

    @property
    def connections(self) -> set[Http2Protocol]:
        """The open connections."""
        return self._connections

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls at once, gives open ones `grace_s` seconds, then cancels what is left and closes.

        Streams take nothing new, and end when what was asked on them is answered.
        """
        if self._listener is None:
            return
        self._is_stopping = True
        for call in list(self._open_calls):
            if isinstance(call, StreamCall):
                call.drain()
        await _wait_until_empty(self._open_calls, grace_s)
        self._listener.close()
        if self._open_calls:
            logger.warning("closing gRPC with %d calls open", len(self._open_calls))
        for call in list(self._open_calls):
            call.fail(CallError.of(shutting_down()))
        for protocol in list(self._connections):
            protocol.connection.close()
        await _wait_until_empty(self._connections, _LAST_WORDS_S)
        for protocol in list(self._connections):
            protocol.abort()

    # What connections ask of their application

    def interpret(self, head: RequestHead) -> CallHead:
        """See Application."""
        return CallHead(head, self._handlers, self._access)

    def open(self, stream: Stream, head: CallHead) -> GrpcCall:
        """See Application."""
        limit, handler = self._options.max_receive_bytes, head.handler
        if isinstance(handler, Streaming):
            return StreamCall(stream, head, limit, partial(self._converse, handler), self._open_calls)
        return UnaryCall(stream, head, limit, self._serve, self._open_calls)

    def _converse(self, method: Streaming, call: StreamCall) -> Conversation:
        if self._is_stopping:
            raise shutting_down()
        return method.converse(call)

    def _serve(self, call: UnaryCall, message: Message) -> None:
        """Has the call's handler serve it; errors are told to the client as gRPC statuses."""
        handler = call.head.handler
        try:
            if self._is_stopping and handler != self._check_health:
                raise shutting_down()
            handler(call, message)
        except WeirError as error:
            call.fail(CallError.of(error))
        except Exception as error:  # noqa: BLE001 - reported; the client gets no internals
            report("gateway.grpc.server: handling a call", error)
            call.fail(CallError(Status.INTERNAL, "internal server error"))

    def _make_handlers(self, doors: Doors, compression_level: int) -> dict[bytes, Handler | Streaming]:
        requests = InferRequests(doors)
        later = None if doors.later is None else LaterCalls(doors, doors.later)
        methods: Methods = {
            **metadata_methods(doors),
            **statistics_methods(doors),
            **repository_methods(doors),
            **shared_memory_methods(doors),
            **settings_methods(doors),
            **infer_methods(requests, compression_level, later),
            **stream_methods(requests, compression_level),
        }
        handlers = {f"/inference.GRPCInferenceService/{name}".encode(): handler for name, handler in methods.items()}
        reflection = {f"/{name}".encode(): method for name, method in reflection_methods().items()}
        return {**handlers, **reflection, b"/grpc.health.v1.Health/Check": self._check_health}

    def _check_health(self, call: UnaryCall, _message: Message) -> None:
        # HealthCheckResponse has one field, the enum `status`: 1 is SERVING, 2 NOT_SERVING. Any service is this one.
        task = asyncio.get_running_loop().create_task(self._tell_health(call))
        call.on_cancel = lambda: _cancel(task)

    async def _tell_health(self, call: UnaryCall) -> None:
        serving = not self._is_stopping and await self._readiness.is_server_ready()
        call.send(b"\x08\x01" if serving else b"\x08\x02", is_last=True)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


async def _wait_until_empty(things: set[Any], timeout_s: float) -> None:
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while things and asyncio.get_running_loop().time() < deadline_s:
        await asyncio.sleep(_POLL_S)

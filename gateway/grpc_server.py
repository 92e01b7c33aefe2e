"""The gRPC front door: `inference.GRPCInferenceService`, as Triton's clients speak it, and the standard health check.

Promises: a request is refused at the door with Triton's code and wording, a call its client gives up is abandoned, and
calls that are open when the server stops get the time they were promised.

Messages cross grpcio as bytes, on the event loop (measured for a 64-byte tensor, CPU of the server a call: 225 us on
uvloop before anything is done, 260 on asyncio, 305 with grpcio's thread pool, 370 with the pool and a hop to the loop;
265 on uvloop with all that is done here). No channel argument or polling strategy that was tried changed it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2

from gateway.grpc_codec import MAX_MESSAGE_BYTES, decode_request, encode_response, parse_message, request_from_message
from gateway.server_info import model_metadata, server_metadata
from schemas.errors import ErrorCode, WeirError, unavailable
from schemas.requests import InferRequest, InferResponse

if TYPE_CHECKING:
    from gateway.catalog import Catalog
    from gateway.inference import Inference

log = logging.getLogger(__name__)

_Answer = Callable[[bytes, grpc.aio.ServicerContext], Awaitable[bytes]]

_STATUS = {status.value[0]: status for status in grpc.StatusCode}

_MAX_DETAILS_BYTES = 2400
"""A status message travels percent-encoded, three bytes for one at worst, in the 8 KiB clients grant to metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcOptions:
    """Options of the gRPC server, with Triton's names and defaults: sizes in bytes, times in milliseconds.

    `max_connection_age` and its grace are unlimited when 0. `reuse_port` lets several processes share the port; without
    it a taken port is an error.
    """

    max_receive_bytes: int = MAX_MESSAGE_BYTES
    keepalive_time: int = 7_200_000
    keepalive_timeout: int = 20_000
    keepalive_permit_without_calls: bool = False
    http2_max_pings_without_data: int = 2
    http2_min_recv_ping_interval_without_data: int = 300_000
    http2_max_ping_strikes: int = 2
    max_connection_age: int = 0
    max_connection_age_grace: int = 0
    reuse_port: bool = False

    def channel_arguments(self) -> list[tuple[str, int]]:
        """The options as grpcio takes them."""
        arguments = [
            ("grpc.max_receive_message_length", self.max_receive_bytes),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.keepalive_time_ms", self.keepalive_time),
            ("grpc.keepalive_timeout_ms", self.keepalive_timeout),
            ("grpc.keepalive_permit_without_calls", int(self.keepalive_permit_without_calls)),
            ("grpc.http2.max_pings_without_data", self.http2_max_pings_without_data),
            ("grpc.http2.min_ping_interval_without_data_ms", self.http2_min_recv_ping_interval_without_data),
            ("grpc.http2.max_ping_strikes", self.http2_max_ping_strikes),
            ("grpc.so_reuseport", int(self.reuse_port)),
        ]
        if self.max_connection_age:
            arguments.append(("grpc.max_connection_age_ms", self.max_connection_age))
        if self.max_connection_age_grace:
            arguments.append(("grpc.max_connection_age_grace_ms", self.max_connection_age_grace))
        return arguments


class GrpcServer:
    """One gRPC server on one port, on the running event loop.

    `server_id` is the server's name in its metadata (Triton's `--id`).
    """

    def __init__(
        self, catalog: Catalog, inference: Inference, server_id: str = "triton", options: GrpcOptions | None = None
    ) -> None:
        self._catalog = catalog
        self._inference = inference
        self._metadata = service_pb2.ServerMetadataResponse(**server_metadata(server_id))
        self._options = options or GrpcOptions()
        self._server: grpc.aio.Server | None = None
        self._open_calls = 0
        self._stopping = False
        self._drained = asyncio.Event()

    async def start(self, address: str, port: int) -> int:
        """Listens on `address` and `port` (0: a free one) and returns the port. Raises OSError when it can't."""
        server = grpc.aio.server(options=self._options.channel_arguments())
        for service, methods in self._services().items():
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
        host = f"[{address}]" if ":" in address else address
        try:
            bound = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise OSError(f"gRPC can't listen on {host}:{port}: is the port taken?") from error
        await server.start()
        self._server = server
        return int(bound)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls at once, gives open ones `grace_s` seconds, then cancels what is left and closes."""
        if self._server is None:
            return
        deadline = asyncio.get_running_loop().time() + grace_s
        self._stopping = True
        if self._open_calls:
            try:
                await asyncio.wait_for(self._drained.wait(), grace_s)
            except TimeoutError:
                log.warning("closing gRPC with %d calls open", self._open_calls)
        await self._server.stop(max(0.0, deadline - asyncio.get_running_loop().time()))

    def _services(self) -> dict[str, dict[str, grpc.RpcMethodHandler]]:
        inference: dict[str, _Answer] = {
            "ServerLive": _from_message(service_pb2.ServerLiveRequest, self._server_live),
            "ServerReady": _from_message(service_pb2.ServerReadyRequest, self._server_ready),
            "ModelReady": _from_message(service_pb2.ModelReadyRequest, self._model_ready),
            "ServerMetadata": _from_message(service_pb2.ServerMetadataRequest, self._server_metadata),
            "ModelMetadata": _from_message(service_pb2.ModelMetadataRequest, self._model_metadata),
            "ModelConfig": _from_message(service_pb2.ModelConfigRequest, self._model_config),
            "ModelInfer": self._model_infer,
        }
        unary = grpc.unary_unary_rpc_method_handler
        return {
            "inference.GRPCInferenceService": {name: unary(self._guarded(rpc)) for name, rpc in inference.items()},
            "grpc.health.v1.Health": {"Check": unary(self._check_health)},
        }

    def _guarded(self, answer: _Answer) -> _Answer:
        """`answer`, counted as an open call, with errors told to the client as gRPC statuses."""

        async def guarded(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
            self._open_calls += 1
            try:
                if self._stopping:
                    raise unavailable("GRPC server is shutting down and has stopped accepting new requests.")
                return await answer(data, context)
            except WeirError as error:
                status, details = _STATUS[error.grpc_status], _details(error.message)
            except Exception:  # a bug of ours: the log gets the traceback, the client no internals
                log.exception("a gRPC call failed")
                status, details = grpc.StatusCode.INTERNAL, "internal server error"
            finally:
                self._open_calls -= 1
                if self._stopping and not self._open_calls:
                    self._drained.set()
            await context.abort(status, details)
            raise AssertionError("abort always raises")

        return guarded

    def _server_live(self, _request: Any) -> Any:
        return service_pb2.ServerLiveResponse(live=True)

    def _server_ready(self, _request: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=self._catalog.server_ready())

    def _model_ready(self, request: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=self._catalog.is_ready(request.name, request.version))

    def _server_metadata(self, _request: Any) -> Any:
        return self._metadata

    def _model_metadata(self, request: Any) -> Any:
        served = self._catalog.resolve(request.name, request.version)
        return service_pb2.ModelMetadataResponse(**model_metadata(served, request.version))

    def _model_config(self, request: Any) -> Any:
        served = self._catalog.resolve(request.name, request.version)
        return service_pb2.ModelConfigResponse(config=served.config_message)

    async def _model_infer(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        message, raw_contents = decode_request(data)
        served = self._catalog.resolve(message.model_name, message.model_version)
        if served.config.is_decoupled:
            raise WeirError(
                ErrorCode.UNSUPPORTED, "ModelInfer RPC doesn't support models with decoupled transaction policy"
            )
        request = request_from_message(message, raw_contents)
        request.traceparent = _traceparent(context)
        response = await self._infer(request)
        return encode_response(request, response, served.labels, served.config.max_batch_size > 0)

    async def _infer(self, request: InferRequest) -> InferResponse:
        """The answer to `request`. Raises the WeirError that answers it; abandons it when the call is cancelled."""
        settled: asyncio.Future[InferResponse | WeirError] = asyncio.get_running_loop().create_future()

        def settle(answer: InferResponse | WeirError) -> None:
            if not settled.done():
                settled.set_result(answer)

        pending = self._inference.submit(request, settle, gather=True)
        try:
            answer = await settled
        except asyncio.CancelledError:
            self._inference.abandon(pending)
            raise
        if isinstance(answer, WeirError):
            raise answer
        return answer

    async def _check_health(self, _data: bytes, _context: grpc.aio.ServicerContext) -> bytes:
        # HealthCheckResponse has one field, the enum `status`: 1 is SERVING, 2 NOT_SERVING. Any service is this one.
        serving = self._catalog.server_ready() and not self._stopping
        return b"\x08\x01" if serving else b"\x08\x02"


def _from_message(request_type: Any, answer: Callable[[Any], Any]) -> _Answer:
    """`answer`, a function from request message to response message, as one from bytes to bytes."""

    async def from_bytes(data: bytes, _context: grpc.aio.ServicerContext) -> bytes:
        serialized: bytes = answer(parse_message(request_type, data)).SerializeToString()
        return serialized

    return from_bytes


def _traceparent(context: grpc.aio.ServicerContext) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent":
            return str(value)
    return ""


def _details(message: str) -> str:
    """`message` as a gRPC status may carry it: the middle of a long one is left out."""
    encoded = message.encode(errors="replace")
    if len(encoded) <= _MAX_DETAILS_BYTES:
        return message
    half = _MAX_DETAILS_BYTES // 2
    return f"{encoded[:half].decode(errors='ignore')} … {encoded[-half:].decode(errors='ignore')}"

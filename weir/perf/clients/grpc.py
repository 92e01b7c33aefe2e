"""`GrpcClient`: calls of `ModelInfer`, or messages on streams of `ModelStreamInfer`; messages are encoded once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from weir.perf.clients.addresses import ServerAddress
from weir.perf.clients.session import Answer, CallFailed, SampleRequest
from weir.perf.load.sequences import SequenceStep
from weir.runtime.certificates import client_files, trusted_pem
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START, Parameters
from weir.schemas.kserve.regions import region_parameters
from weir.schemas.kserve.triton_messages import messages

SERVICE = "/inference.GRPCInferenceService/"

_SESSIONS_PER_CHANNEL = 16
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a connection for each channel
]
_WANTS_EMPTY_FINAL = "triton_enable_empty_final_response"
_IS_FINAL = "triton_final_response"
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN)


def open_channel(address: ServerAddress) -> grpc.aio.Channel:
    """A channel that connects when it is used."""
    if address.is_secure:
        return grpc.aio.secure_channel(str(address), _credentials(address), _OPTIONS)
    return grpc.aio.insecure_channel(str(address), _OPTIONS)


def _credentials(address: ServerAddress) -> grpc.ChannelCredentials:
    own = client_files()
    cert, key = (None, None) if own is None else (Path(path).read_bytes() for path in own)
    return grpc.ssl_channel_credentials(trusted_pem(address.pinned), key, cert)


def grpc_metadata(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Headers as gRPC metadata."""
    return tuple((name.lower(), value) for name, value in headers.items())


def failed_call(error: grpc.RpcError) -> CallFailed:
    """The failure of a call, in the server's words."""
    code, details = error.code(), error.details() or ""
    is_lost = code in _LOST and ("connect" in details.lower() or "socket" in details.lower())
    return CallFailed(details or str(code), is_connection=is_lost)


class GrpcClient:
    """Calls a model of a server; with `streams`, each session has a stream of its own.

    A request that takes longer than `timeout_s` has failed.
    """

    def __init__(  # noqa: PLR0913 - the parts of a call
        self,
        address: ServerAddress,
        model: str,
        version: str,
        headers: Mapping[str, str],
        timeout_s: float,
        streams: bool = False,
    ) -> None:
        self.address = address
        self.metadata = grpc_metadata(headers)
        self.timeout_s = timeout_s
        self._model = model
        self._version = version
        self._streams = streams
        self._encoded: list[bytes] = []
        self._channels: list[grpc.aio.Channel] = []
        self._sessions = 0

    def load(self, samples: Sequence[SampleRequest]) -> None:
        """Encodes the samples. Raises ValueError for outputs with parameters, which only HTTP and NATS carry."""
        self._encoded = [self._message(sample).SerializeToString() for sample in samples]

    def load_messages(self, encoded: Sequence[bytes]) -> None:
        """Sends these messages in place of samples."""
        self._encoded = list(encoded)

    def encoded(self, sample: int, step: SequenceStep | None) -> bytes:
        """The message as it is sent. Messages are joined by joining their bytes: a sequence's parameters come first."""
        if step is None:
            return self._encoded[sample]
        values: Parameters = {"sequence_id": step.correlation_id}
        values["sequence_start"] = bool(step.flags & SEQUENCE_START)
        values["sequence_end"] = bool(step.flags & SEQUENCE_END)
        message = messages.ModelInferRequest()
        _set_parameters(message.parameters, values)
        return bytes(message.SerializeToString()) + self._encoded[sample]

    def session(self) -> GrpcSession | GrpcStream:
        """A session; some sessions share a connection."""
        if self._sessions % _SESSIONS_PER_CHANNEL == 0:
            self._channels.append(open_channel(self.address))
        self._sessions += 1
        channel = self._channels[-1]
        return GrpcStream(self, channel) if self._streams else GrpcSession(self, channel)

    async def close(self) -> None:
        """Closes all connections."""
        channels, self._channels = self._channels, []
        for channel in channels:
            await channel.close()

    def _message(self, sample: SampleRequest) -> Any:
        request = sample.request
        message = messages.ModelInferRequest(model_name=self._model, model_version=self._version, id=request.id)
        parameters = dict(request.parameters or {})
        if request.priority:
            parameters["priority"] = request.priority
        if request.timeout_us:
            parameters["timeout"] = request.timeout_us
        if self._streams:
            parameters[_WANTS_EMPTY_FINAL] = True
        _set_parameters(message.parameters, parameters)
        for tensor in request.inputs:
            row = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            if tensor.name in sample.places:
                _set_parameters(row.parameters, region_parameters(*sample.places[tensor.name]))
            elif not isinstance(tensor.data, tuple):
                message.raw_input_contents.append(bytes(tensor.data))
        for output in request.outputs:
            row = message.outputs.add(name=output.name)
            if output.class_count:
                row.parameters["classification"].int64_param = output.class_count
        return message


class GrpcSession:
    """Unary calls, one after the other."""

    def __init__(self, client: GrpcClient, channel: grpc.aio.Channel) -> None:
        self._client = client
        self._call = channel.unary_unary(f"{SERVICE}ModelInfer")  # without (de)serializers: bytes both ways

    async def infer(self, sample: int, step: SequenceStep | None) -> Answer:
        """Sends one request. Raises CallFailed."""
        client = self._client
        try:
            await self._call(client.encoded(sample, step), timeout=client.timeout_s, metadata=client.metadata)
        except grpc.RpcError as error:
            raise failed_call(error) from error
        end_s = time.perf_counter()
        return Answer((end_s,), end_s)

    async def close(self) -> None:
        """Does nothing: the client closes the connections."""


class GrpcStream:
    """A stream of `ModelStreamInfer`, opened when it is first used and after each failure."""

    def __init__(self, client: GrpcClient, channel: grpc.aio.Channel) -> None:
        self._client = client
        self._open = channel.stream_stream(
            f"{SERVICE}ModelStreamInfer", response_deserializer=messages.ModelStreamInferResponse.FromString
        )
        self._call: Any = None

    async def infer(self, sample: int, step: SequenceStep | None) -> Answer:
        """Sends one request and reads its responses until the final one. Raises CallFailed."""
        try:
            async with asyncio.timeout(self._client.timeout_s):
                if self._call is None:
                    self._call = self._open(metadata=self._client.metadata)
                await self._call.write(self._client.encoded(sample, step))
                return await self._responses(self._call)
        except TimeoutError:
            self._drop()
            raise CallFailed(f"no final response within {self._client.timeout_s:g} s") from None
        except grpc.RpcError as error:
            self._drop()
            raise failed_call(error) from error
        except asyncio.InvalidStateError as error:
            # The stream ended after its last answer: grpc.aio raises this when something is written to it.
            self._drop()
            raise CallFailed("the server ended the stream", is_connection=True) from error
        except (asyncio.CancelledError, CallFailed):
            self._drop()
            raise

    async def close(self) -> None:
        """Ends the stream."""
        call, self._call = self._call, None
        if call is not None:
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # its requests are all answered
                await call.done_writing()
                while await call.read() is not grpc.aio.EOF:
                    pass

    async def _responses(self, call: Any) -> Answer:
        arrived_s: list[float] = []
        while True:
            message = await call.read()
            now_s = time.perf_counter()
            if message is grpc.aio.EOF:
                raise CallFailed("the server ended the stream", is_connection=True)
            if message.error_message:
                raise CallFailed(message.error_message)
            response = message.infer_response
            is_final = response.parameters[_IS_FINAL].bool_param if _IS_FINAL in response.parameters else False
            if response.outputs or not is_final:
                arrived_s.append(now_s)
            if is_final:
                return Answer(arrived_s, now_s)

    def _drop(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()


def _set_parameters(target: Any, values: Parameters) -> None:
    for name, value in values.items():
        match value:
            case bool():
                target[name].bool_param = value
            case int():
                target[name].int64_param = value
            case float():
                target[name].double_param = value
            case _:
                target[name].string_param = str(value)

"""`Client`: a gRPC client of a server for Python programs.

All methods raise WeirError with the server's code and message.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from weir.inference import InferResult, infer_request
from weir.options.api_key import bearer
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.kserve.triton_messages import messages, service_stub

_Metadata = tuple[tuple[str, str], ...]

Outputs = Sequence[str] | Mapping[str, int]

# The server limits the size of tensors; the client sets no limit of its own.
_CHANNEL = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))

# Requests that errors of a stream become the status of the call, because only the status has a code.
_STREAM_METADATA = (("triton_grpc_error", "true"),)


class Client:
    """A client of the gRPC server at `grpc_url` ("host:port"). Methods block, except those whose name begins with `a`.

    With `credentials`, as `grpc.ssl_channel_credentials` makes them, the connection is encrypted. `api_key` is the key or
    token to show to a server with an access policy, or "@FILE" for the first line of a file. Raises ValueError for what
    is none.
    """

    def __init__(self, grpc_url: str, credentials: grpc.ChannelCredentials | None = None, api_key: str = "") -> None:
        self.grpc_url = grpc_url
        self.credentials = credentials
        self._shown = (("authorization", bearer(api_key, "api_key")),) if api_key else ()
        self._channel: grpc.Channel | None = None
        self._aio_channel: grpc.aio.Channel | None = None
        self._aio_loop: asyncio.AbstractEventLoop | None = None

    def infer(self, model: str, inputs: Mapping[str, Any], outputs: Outputs = (), **details: Any) -> InferResult:
        """Run `model` on `inputs` (arrays, or pairs `(values, datatype)`, by name) and return its response.

        `outputs` are the names of the requested outputs, all if empty. A mapping requests classification: `{"scores": 3}`
        returns the top 3 classes of that output. `details` are `model_version`, `request_id`, `parameters`,
        `sequence_id` with `sequence_start` and `sequence_end`, `priority`, and `timeout_us` (maximum time in the queue).
        Raises WeirError.
        """
        request = infer_request(model, inputs, outputs, **details)
        with _weir_errors():
            return InferResult(self._stub().ModelInfer(request))

    def stream(
        self, model: str, inputs: Mapping[str, Any], outputs: Outputs = (), **details: Any
    ) -> Iterator[InferResult]:
        """Yield the responses of a decoupled model as they arrive.

        The arguments are those of `infer`. The request is sent when the first response is requested. Raises WeirError.
        """
        request = infer_request(model, inputs, outputs, **details)
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        with _weir_errors():
            call = self._stub().ModelStreamInfer(iter([request]), metadata=_STREAM_METADATA)
            try:
                for response in call:
                    result = _streamed(response)
                    if result is not None:
                        yield result
            finally:
                call.cancel()

    async def ainfer(self, model: str, inputs: Mapping[str, Any], outputs: Outputs = (), **details: Any) -> InferResult:
        """As `infer`, without blocking the running event loop."""
        request = infer_request(model, inputs, outputs, **details)
        with _weir_errors():
            return InferResult(await self._aio_stub().ModelInfer(request))

    async def astream(
        self, model: str, inputs: Mapping[str, Any], outputs: Outputs = (), **details: Any
    ) -> AsyncIterator[InferResult]:
        """As `stream`, without blocking the running event loop."""
        request = infer_request(model, inputs, outputs, **details)
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        with _weir_errors():
            call = self._aio_stub().ModelStreamInfer(iter([request]), metadata=_STREAM_METADATA)
            try:
                async for response in call:
                    result = _streamed(response)
                    if result is not None:
                        yield result
            finally:
                call.cancel()

    def ready(self, model: str | None = None, model_version: str | int = "") -> bool:
        """Whether the server, or one of its models, is ready. A model that does not exist is not ready."""
        try:
            with _weir_errors():
                if model is None:
                    return bool(self._stub().ServerReady(messages.ServerReadyRequest()).ready)
                request = messages.ModelReadyRequest(name=model, version=str(model_version))
                return bool(self._stub().ModelReady(request).ready)
        except WeirError as error:
            if error.code in (ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE):
                return False
            raise

    def metadata(self, model: str | None = None, model_version: str | int = "") -> dict[str, Any]:
        """The metadata of the server, or of a model: its versions, inputs and outputs. Raises WeirError."""
        with _weir_errors():
            if model is None:
                return _plain(self._stub().ServerMetadata(messages.ServerMetadataRequest()))
            request = messages.ModelMetadataRequest(name=model, version=str(model_version))
            return _plain(self._stub().ModelMetadata(request))

    def config(self, model: str, model_version: str | int = "") -> dict[str, Any]:
        """The completed configuration of a model. Raises WeirError."""
        request = messages.ModelConfigRequest(name=model, version=str(model_version))
        with _weir_errors():
            return _plain(self._stub().ModelConfig(request).config)

    def statistics(self, model: str = "", model_version: str | int = "") -> list[dict[str, Any]]:
        """Statistics of each version since it was loaded, for one model or for all. Raises WeirError."""
        request = messages.ModelStatisticsRequest(name=model, version=str(model_version))
        with _weir_errors():
            return [_plain(one) for one in self._stub().ModelStatistics(request).model_stats]

    def index(self) -> list[dict[str, Any]]:
        """The models of the repositories with their states: name, version, state, reason. Raises WeirError."""
        with _weir_errors():
            return [_plain(one) for one in self._stub().RepositoryIndex(messages.RepositoryIndexRequest()).models]

    def load(
        self,
        model: str,
        config: str | Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Load or reload a model on a server with `model_control_mode="explicit"`; returns once the model is ready.

        `config` replaces its configuration. `files` (by path in the model's folder: "1/model.onnx") replace its files
        and require a `config`. Raises WeirError.
        """
        request = messages.RepositoryModelLoadRequest(model_name=model)
        if config is not None:
            request.parameters["config"].string_param = config if isinstance(config, str) else json.dumps(dict(config))
        for path, content in (files or {}).items():
            request.parameters[f"file:{path.removeprefix('file:')}"].bytes_param = content
        with _weir_errors():
            self._stub().RepositoryModelLoad(request)

    def unload(self, model: str, unload_dependents: bool = False) -> None:
        """Unload a model, with `unload_dependents` also the models an ensemble consists of. Raises WeirError."""
        request = messages.RepositoryModelUnloadRequest(model_name=model)
        if unload_dependents:
            request.parameters["unload_dependents"].bool_param = True
        with _weir_errors():
            self._stub().RepositoryModelUnload(request)

    def close(self) -> None:
        """Close the connection; the next call opens it again."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._aio_channel = None

    async def aclose(self) -> None:
        """As `close`, in the event loop of the asynchronous calls."""
        if self._aio_channel is not None:
            await self._aio_channel.close()
        self.close()

    def _address(self) -> str:
        """The address to connect to. Raises StartError if the server is not running."""
        return self.grpc_url

    def _stub(self) -> Any:
        if self._channel is None:
            address, credentials = self._address(), self.credentials
            if credentials is None:
                self._channel = grpc.insecure_channel(address, _CHANNEL)
            else:
                self._channel = grpc.secure_channel(address, credentials, _CHANNEL)
        return self._showing(service_stub(self._channel))

    def _aio_stub(self) -> Any:
        # A channel belongs to one event loop; a program may run several loops one after the other.
        loop = asyncio.get_running_loop()
        if self._aio_channel is None or self._aio_loop is not loop:
            address, credentials = self._address(), self.credentials
            if credentials is None:
                self._aio_channel = grpc.aio.insecure_channel(address, _CHANNEL)
            else:
                self._aio_channel = grpc.aio.secure_channel(address, credentials, _CHANNEL)
            self._aio_loop = loop
        return self._showing(service_stub(self._aio_channel))

    def _showing(self, stub: Any) -> Any:
        return _Showing(stub, self._shown) if self._shown else stub


class _Showing:
    """The methods of `stub`, each of whose calls sends `shown` as metadata too."""

    def __init__(self, stub: Any, shown: _Metadata) -> None:
        self._stub = stub
        self._shown = shown

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stub, name)
        return lambda sent, metadata=(): method(sent, metadata=(*self._shown, *metadata))


@contextlib.contextmanager
def _weir_errors() -> Iterator[None]:
    """Raise gRPC errors as WeirErrors, without the original as cause: that repeats the message in many lines."""
    try:
        yield
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        raise WeirError(ErrorCode.of_grpc(code.value[0]), error.details() or code.name) from None


def _streamed(message: Any) -> InferResult | None:
    """The result in a stream message; None for a final message without a result."""
    if message.error_message:
        raise WeirError(ErrorCode.UNKNOWN, message.error_message)
    response = message.infer_response
    is_final = response.parameters["triton_final_response"].bool_param
    return None if is_final and not response.outputs else InferResult(response)


def _plain(message: Message) -> dict[str, Any]:
    """`message` as dictionaries, lists and plain values; message fields that are not set are left out."""
    return {
        field.name: _plain_field(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _plain_field(field: FieldDescriptor, value: Any) -> Any:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        one = kind.fields_by_name["value"]
        return {key: _plain_value(one, entry) for key, entry in value.items()}
    if isinstance(value, Message | str | bytes | int | float):
        return _plain_value(field, value)
    return [_plain_value(field, entry) for entry in value]


def _plain_value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return _plain(value)
    return field.enum_type.values_by_number[value].name if field.enum_type is not None else value

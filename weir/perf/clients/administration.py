"""`Administration`: what a server reports about itself and a model, over HTTP or gRPC, and the registration of regions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Protocol

import grpc
import orjson
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from weir.perf.clients.addresses import ServerAddress
from weir.perf.clients.grpc import failed_call, grpc_metadata, open_channel
from weir.perf.clients.http import HttpClient, HttpSession, error_text, http_head
from weir.perf.clients.session import CallFailed, Denied, Unreachable
from weir.schemas.core.names import model_path
from weir.schemas.kserve.triton_messages import messages, service_stub

TIMEOUT_S = 10.0

WEIR = "weir"
"""The name of Weir in the heading of a report. Its metadata has Triton's name by default, as clients expect it."""

_OWN_METHOD = "/weir.v1.TrafficService/GetTraffic"
_DENIED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_ANSWERS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)


class Administration(Protocol):
    """Questions to a server. All raise Unreachable if it does not answer, or answers with an error."""

    async def server(self) -> dict[str, Any]:
        """The metadata of the server: `name`, `version`, `extensions`. The name of Weir is "weir", whatever its `--id`."""

    async def config(self, model: str, version: str) -> dict[str, Any]:
        """The configuration of a model."""

    async def statistics(self, model: str, version: str) -> list[dict[str, Any]]:
        """The statistics of a model's versions (`model_stats`)."""

    async def register(self, name: str, key: str, size: int) -> None:
        """Registers `size` bytes of the POSIX shared-memory object `key` as region `name`."""

    async def unregister(self, name: str) -> None:
        """Removes a region; one that is not registered is no error."""

    async def close(self) -> None:
        """Disconnects."""


class HttpAdministration:
    """Over HTTP. `headers` are sent with each request."""

    def __init__(self, address: ServerAddress, headers: Mapping[str, str], hint: str = "") -> None:
        self._address = address
        self._headers = headers
        self._hint = hint
        # One session for one question at a time.
        self._session = HttpSession(HttpClient(address, "", headers, TIMEOUT_S))
        self._turn = asyncio.Lock()

    async def server(self) -> dict[str, Any]:
        """`GET /v2`."""
        found = await self._ask("GET", "/v2")
        return {**found, "name": WEIR} if "durability" in found else found

    async def config(self, model: str, version: str) -> dict[str, Any]:
        """`GET /v2/models/<model>/config`."""
        return await self._ask("GET", f"{model_path(model, version)}/config")

    async def statistics(self, model: str, version: str) -> list[dict[str, Any]]:
        """`GET /v2/models/<model>/stats`."""
        return list((await self._ask("GET", f"{model_path(model, version)}/stats")).get("model_stats", ()))

    async def register(self, name: str, key: str, size: int) -> None:
        """`POST /v2/systemsharedmemory/region/<name>/register`."""
        document = {"key": key, "offset": 0, "byte_size": size}
        await self._ask("POST", f"/v2/systemsharedmemory/region/{name}/register", document)

    async def unregister(self, name: str) -> None:
        """`POST /v2/systemsharedmemory/region/<name>/unregister`."""
        await self._ask("POST", f"/v2/systemsharedmemory/region/{name}/unregister", {})

    async def close(self) -> None:
        """Disconnects."""
        await self._session.close()

    async def _ask(self, method: str, path: str, document: Any = None) -> dict[str, Any]:
        body = b"" if document is None else orjson.dumps(document)
        headers = {**self._headers, "Content-Type": "application/json"}
        head = http_head(self._address, method, path, headers, len(body))
        try:
            async with self._turn:
                reply = await self._session.exchange([head + body], keeps_body=True)
        except CallFailed as error:
            raise _unreachable(self._address, error, self._hint) from error
        if reply.status != 200:
            is_denied = reply.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
            raise (Denied if is_denied else Unreachable)(error_text(reply))
        try:
            answer = orjson.loads(reply.body) if reply.body else {}
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise Unreachable(f"{self._address} is not an inference server: {path} returned no JSON object")
        return answer


class GrpcAdministration:
    """Over gRPC. `headers` are sent as metadata of each call."""

    def __init__(self, address: ServerAddress, headers: Mapping[str, str], hint: str = "") -> None:
        self._address = address
        self._hint = hint
        self._metadata = grpc_metadata(headers)
        self._channel = open_channel(address)
        self._stub = service_stub(self._channel)

    async def server(self) -> dict[str, Any]:
        """`ServerMetadata`."""
        found = await self._ask(self._stub.ServerMetadata, messages.ServerMetadataRequest())
        return {**found, "name": WEIR} if await self._is_weir() else found

    async def config(self, model: str, version: str) -> dict[str, Any]:
        """`ModelConfig`."""
        answer = await self._ask(self._stub.ModelConfig, messages.ModelConfigRequest(name=model, version=version))
        return dict(answer.get("config", {}))

    async def statistics(self, model: str, version: str) -> list[dict[str, Any]]:
        """`ModelStatistics`."""
        request = messages.ModelStatisticsRequest(name=model, version=version)
        return list((await self._ask(self._stub.ModelStatistics, request)).get("model_stats", ()))

    async def register(self, name: str, key: str, size: int) -> None:
        """`SystemSharedMemoryRegister`."""
        request = messages.SystemSharedMemoryRegisterRequest(name=name, key=key, offset=0, byte_size=size)
        await self._ask(self._stub.SystemSharedMemoryRegister, request)

    async def unregister(self, name: str) -> None:
        """`SystemSharedMemoryUnregister`."""
        await self._ask(
            self._stub.SystemSharedMemoryUnregister, messages.SystemSharedMemoryUnregisterRequest(name=name)
        )

    async def close(self) -> None:
        """Disconnects."""
        await self._channel.close()

    async def _is_weir(self) -> bool:
        """Whether the server has a method of Weir's own, whatever it answers to an empty request."""
        try:
            await self._channel.unary_unary(_OWN_METHOD)(b"", timeout=TIMEOUT_S, metadata=self._metadata)
        except grpc.RpcError as error:
            return error.code() in _ANSWERS
        return True

    async def _ask(self, call: Any, request: Message) -> dict[str, Any]:
        try:
            answer = await call(request, timeout=TIMEOUT_S, metadata=self._metadata)
        except grpc.RpcError as error:
            failure = failed_call(error)
            if failure.is_connection:
                raise _unreachable(self._address, failure, self._hint) from error
            raise (Denied if error.code() in _DENIED else Unreachable)(str(failure)) from error
        return dict(MessageToDict(answer, preserving_proto_field_name=True))


def _unreachable(address: ServerAddress, error: CallFailed, hint: str) -> Unreachable:
    text = f"{address} is not reachable: {error}"
    return Unreachable(f"{text}. {hint}" if hint else text)

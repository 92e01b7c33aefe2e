"""Stock clients of either protocol that register shared memory, for the tests of shared memory."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from tests.support.servers.endpoints import Endpoints
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until
from weir.schemas.core.tensors import DATATYPES

NOT_FOUND = {"http": "404", "grpc": "NOT_FOUND"}
INVALID = {"http": "400", "grpc": "INVALID_ARGUMENT"}
INTERNAL = {"http": "500", "grpc": "INTERNAL"}
EXISTS = {"http": "400", "grpc": "ALREADY_EXISTS"}
UNSUPPORTED = {"http": "501", "grpc": "UNIMPLEMENTED"}


class StockClient:
    """One of the two stock clients; what differs between them is told in the same words."""

    def __init__(self, protocol: str, endpoints: Endpoints) -> None:
        self.protocol = protocol
        self.module: ModuleType = tritonclient.http if protocol == "http" else tritonclient.grpc
        self.client: Any = endpoints.http() if protocol == "http" else endpoints.grpc()

    def input(self, name: str, shape: Sequence[int], datatype: str, region: str, size: int, offset: int = 0) -> Any:
        tensor = self.module.InferInput(name, list(shape), datatype)
        tensor.set_shared_memory(region, size, offset)
        return tensor

    def output(self, name: str, region: str, size: int, offset: int = 0) -> Any:
        tensor = self.module.InferRequestedOutput(name)
        tensor.set_shared_memory(region, size, offset)
        return tensor

    def data(self, name: str, array: np.ndarray, datatype: str) -> Any:
        tensor = self.module.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        return tensor

    def status(self, kind: str = "system", name: str = "") -> dict[str, dict[str, Any]]:
        """The rows of a status by name."""
        ask = getattr(self.client, f"get_{kind}_shared_memory_status")
        if self.protocol == "http":
            return {row["name"]: row for row in ask(name)}
        regions = ask(name, as_json=True).get("regions", {})
        numbers = {"byte_size", "offset", "device_id"}
        default = {"offset": 0} if kind == "system" else {"device_id": 0}
        return {
            key: default | {field: int(value) if field in numbers else value for field, value in row.items()}
            for key, row in regions.items()
        }

    def refusal(self, call: str, *arguments: Any, **more: Any) -> tuple[str, str]:
        """(code, text) of the error that a call ends with."""
        try:
            getattr(self.client, call)(*arguments, **more)
        except InferenceServerException as error:
            return str(error.status()).removeprefix("StatusCode."), error.message()
        raise AssertionError("it was not refused")


class Memory:
    """A POSIX object, made as clients make it; `buf` is its content."""

    def __init__(self, size: int, fill: int = 0xA5) -> None:
        self.key = f"/test_{secrets.token_hex(6)}"
        self.handle = shm.create_shared_memory_region("any", self.key, size, create_only=True)
        self.size = size
        self.buf: memoryview = self.handle._mpsm_handle.buf
        self.buf[:] = bytes([fill]) * len(self.buf)

    def put(self, content: bytes, offset: int = 0) -> None:
        self.buf[offset : offset + len(content)] = content

    def get(self, size: int, offset: int = 0) -> bytes:
        return bytes(self.buf[offset : offset + size])

    def close(self) -> None:
        del self.buf
        with contextlib.suppress(FileNotFoundError):
            shm.destroy_shared_memory_region(self.handle)


@contextlib.contextmanager
def memory(size: int) -> Iterator[Memory]:
    made = Memory(size)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def region(client: StockClient, name: str, size: int, offset: int = 0) -> Iterator[Memory]:
    """Memory of which all from `offset` on is registered as `name`."""
    with memory(offset + size) as made:
        client.client.register_system_shared_memory(name, made.key, size, offset=offset)
        try:
            yield made
        finally:
            client.client.unregister_system_shared_memory(name)


@contextlib.contextmanager
def running(folder: Path, models: Path, *options: str) -> Iterator[Server]:
    """A server that ends well."""
    with Server(folder, models, *options) as server:
        yield server
        assert server.in_flight() == 0


@contextlib.contextmanager
def stock_client(protocol: str, server: Server) -> Iterator[StockClient]:
    """A client whose regions leave with it."""
    client = StockClient(protocol, server)
    with client.client:
        yield client
        client.client.unregister_system_shared_memory()
        wait_until(lambda: not client.status())


def sample(datatype: str, count: int) -> np.ndarray:
    """[1, count] elements of a datatype, no two neighbours alike."""
    numbers = np.arange(count).reshape(1, count)
    if datatype == "BYTES":
        words = [b"\0" * (n % 3) + f"wörd {n}".encode() for n in range(count)]
        return np.array(words, np.object_).reshape(1, count)
    return (numbers % 2 if datatype == "BOOL" else numbers % 120).astype(DATATYPES[datatype].numpy)


def content(array: np.ndarray) -> bytes:
    """An array as it travels."""
    return bytes(serialize_byte_tensor(array).item()) if array.dtype.hasobject else array.tobytes()

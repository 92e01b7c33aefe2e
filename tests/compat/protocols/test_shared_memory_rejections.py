"""System shared memory over both protocols with stock clients: all errors, with Triton's texts."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.clients.shared_memory import (
    EXISTS,
    INTERNAL,
    INVALID,
    NOT_FOUND,
    UNSUPPORTED,
    StockClient,
    memory,
    region,
    running,
    sample,
    stock_client,
)
from tests.support.models.zoo import write_identity
from tests.support.servers.weir_server import Server

SHM = Path("/dev/shm")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("refusals")
    for datatype in ("FP32", "BYTES"):
        write_identity(folder / "models", f"identity_{datatype}", datatype)
    with running(folder, folder / "models", "--allow-client-shm=true") as started:
        yield started


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[StockClient]:
    with stock_client(request.param, server) as stock:
        yield stock


def test_registrations_that_are_refused(client: StockClient) -> None:
    register = "register_system_shared_memory"
    failed = "failed to register shared memory region 'r'"
    with memory(64) as shared, region(client, "taken", 64):
        cases: list[tuple[tuple[Any, ...], dict[str, str], str]] = [
            (("taken", shared.key, 64), EXISTS, "shared memory region 'taken' already in manager"),
            (("r", "/nobody", 8), INTERNAL, "Unable to open shared memory region: '/nobody'"),
            (("r", shared.key, 65), INVALID, f"{failed}: invalid args"),
            (("r", shared.key, 60, 5), INVALID, f"{failed}: invalid args"),
            (("r", shared.key, 2**64 - 1, 2), INVALID, f"{failed}: invalid args"),
            (("r", shared.key, 0), INVALID, f"{failed}: unable to process address spaceInvalid argument"),
        ]
        impossible = (
            "///",
            "",
            "/..",
            "a/b",
            "\0",
            "/" * 2,
        )
        cases += [
            (("r", key, 8), INVALID, f"cannot register shared memory region 'r' - invalid shm key '{key}'")
            for key in (*impossible, "x" * 256)
        ]
        reserved = {
            "triton_python_backend_shm_region_1": "triton_python_backend_shm_region_",
            "/triton_python_backend_shm_region_1": "triton_python_backend_shm_region_",
            "weir-gateway.1": "weir-",
            "/.weir-x": ".weir-",
        }
        cases += [
            (
                ("r", key, 8),
                INVALID,
                f"cannot register shared memory region 'r' with key '{key}' as the key contains the reserved prefix "
                f"'{prefix}'",
            )
            for key, prefix in reserved.items()
        ]
        for arguments, code, text in cases:
            assert client.refusal(register, *arguments[:3], offset=(*arguments, 0)[3]) == (code[client.protocol], text)
        assert list(client.status()) == ["taken"]


def test_objects_that_are_no_memory(client: StockClient, tmp_path: Path) -> None:
    names = [f"test_{os.getpid()}_{kind}" for kind in ("link", "folder", "fifo")]
    (tmp_path / "secret").write_bytes(b"secret" * 10)
    (SHM / names[0]).symlink_to(tmp_path / "secret")
    (SHM / names[1]).mkdir()
    os.mkfifo(SHM / names[2])
    try:
        for name in names:
            text = f"Unable to open shared memory region: '{name}'"
            assert client.refusal("register_system_shared_memory", "r", name, 8) == (INTERNAL[client.protocol], text)
    finally:
        (SHM / names[0]).unlink()
        (SHM / names[1]).rmdir()
        (SHM / names[2]).unlink()


def test_places_that_are_refused(client: StockClient) -> None:
    array = sample("FP32", 4)
    with region(client, "r", 64) as shared:
        whole = shared.get(64)
        offset = INVALID, "Invalid offset for shared memory region: 'r'"
        end = INVALID, "Invalid offset + byte size for shared memory region: 'r'"
        places = [
            (("q", 16, 0), (NOT_FOUND, "Unable to find shared memory region: 'q'")),
            (("r", 16, 64), offset),
            (("r", 16, 2**63 - 1), offset),
            (("r", 16, 49), end),
            (("r", 65, 0), end),
            (("r", 2**63 - 1, 1), end),
            (("r", 0, 0), end),
        ]
        if client.protocol == "http":
            overflow = (
                "Integer overflow detected: byte_size (18446744073709551584) + offset (32) exceeds maximum value "
                "(18446744073709551615) for region 'r'"
            )
            places.append((("r", 2**64 - 32, 32), (INVALID, overflow)))
        for place, (code, text) in places:
            expected = code[client.protocol], text
            inputs = [client.input("IN", (1, 4), "FP32", *place)]
            assert client.refusal("infer", "identity_FP32", inputs) == expected
            inputs, outputs = [client.data("IN", array, "FP32")], [client.output("OUT", *place)]
            assert client.refusal("infer", "identity_FP32", inputs, outputs=outputs) == expected
        for size in (12, 20):
            inputs = [client.input("IN", (1, 4), "FP32", "r", size)]
            text = (
                "[request id: <id_unknown>] input byte size mismatch for input 'IN' for model 'identity_FP32'. "
                f"Expected 16, got {size}"
            )
            assert client.refusal("infer", "identity_FP32", inputs) == (INVALID[client.protocol], text)
        inputs, outputs = [client.data("IN", array, "FP32")], [client.output("OUT", "r", 15, 0)]
        assert client.refusal("infer", "identity_FP32", inputs, outputs=outputs) == (
            INTERNAL[client.protocol],
            "shared memory size specified with the request for output 'OUT' (15 bytes) should be at least 16 bytes to "
            "hold the results",
        )
        assert shared.get(64) == whole


STRINGS = "inference input 'IN' for model 'identity_BYTES'"


@pytest.mark.parametrize(
    "sent,text",
    [
        (b"\2\0\0\0ab", f"[request id: <id_unknown>] expected 2 string elements for {STRINGS}, got 1"),
        (
            b"\1\0\0\0a" * 3,
            f"[request id: <id_unknown>] unexpected number of string elements 3 for {STRINGS}, expecting 2",
        ),
        (
            b"\2\0\0\0ab\1\0",
            f"[request id: <id_unknown>] incomplete string length indicator for {STRINGS}, expecting 4 bytes but only 2 "
            "bytes available. Please make sure the string length indicator is in one buffer.",
        ),
        (
            b"\1\0\0\0a\xff\xff\xff\xffx",
            "incomplete string data for inference input 'IN', expecting string of length 4294967295 but only 1 bytes "
            "available",
        ),
    ],
)
def test_strings_that_do_not_fit(client: StockClient, sent: bytes, text: str) -> None:
    with region(client, "r", 64) as shared:
        shared.put(sent)
        inputs = [client.input("IN", (1, 2), "BYTES", "r", len(sent))]
        assert client.refusal("infer", "identity_BYTES", inputs) == (INVALID[client.protocol], text)


def test_gpu_memory_without_a_gpu(client: StockClient) -> None:
    refused = client.refusal("register_cuda_shared_memory", "g", base64.b64encode(bytes(64)), 0, 64)
    text = "failed to register CUDA shared memory region: 'g', GPUs not supported"
    assert refused == (INVALID[client.protocol], text)
    refused = client.refusal("register_cuda_shared_memory", "g", b"", 0, 0)
    assert refused == (INVALID[client.protocol], "failed to register shared memory region: invalid args")
    assert client.status("cuda") == {}
    client.client.unregister_cuda_shared_memory("g")


def test_http_in_its_own_words(server: Server) -> None:
    def post(path: str, body: Any) -> tuple[int, Any]:
        answer = httpx.post(
            f"http://{server.http_place}{path}",
            content=body if isinstance(body, bytes) else None,
            json=None if isinstance(body, bytes) else body,
        )
        return answer.status_code, answer.json() if answer.content else None

    def error(status: int, text: str) -> tuple[int, Any]:
        return status, {"error": text}

    register = "/v2/systemsharedmemory/region/r/register"
    no_number = error(500, "attempt to access JSON non-unsigned-integer as unsigned-integer")
    with memory(64) as shared:
        assert post(register, b"") == error(500, "failed to parse the request JSON buffer: The document is empty. at 0")
        assert post(register, []) == error(400, "Shared memory register request has no 'key' field")
        assert post(register, {"key": "x"}) == error(400, "Shared memory register request has no 'byte_size' field")
        assert post(register, {"key": 5, "byte_size": 5}) == error(500, "attempt to access JSON non-string as string")
        for wrong in ({"byte_size": -1}, {"byte_size": "5"}, {"byte_size": 5, "offset": -1}, {"byte_size": 2**70}):
            assert post(register, {"key": shared.key, **wrong}) == no_number
        assert post(register, b" " * 70_000)[0] == 400
        assert post(register, {"key": shared.key, "byte_size": 64}) == (200, None)
        cuda = "/v2/cudasharedmemory/region/g/register"
        lacks = "attempt to access non-existing object member"
        assert post(cuda, {}) == error(400, "Shared memory register request has no 'raw_handle' field")
        assert post(cuda, {"raw_handle": {}}) == error(500, f"{lacks} 'b64'")
        assert post(cuda, {"raw_handle": {"b64": "aaaa"}}) == error(500, f"{lacks} 'byte_size'")
        assert post(cuda, {"raw_handle": {"b64": "aaaa"}, "byte_size": 1}) == error(500, f"{lacks} 'device_id'")
        assert post(cuda, {"raw_handle": {"b64": "!!"}, "byte_size": 1, "device_id": 0}) == error(
            400, "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"
        )
        for method, path in [
            ("GET", register),
            ("POST", "/v2/systemsharedmemory/status"),
            ("GET", "/v2/cudasharedmemory/unregister"),
        ]:
            assert httpx.request(method, f"http://{server.http_place}{path}").status_code == 405

        place = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
        given = {"name": "IN", "shape": [1, 4], "datatype": "FP32"}
        infer = "/v2/models/identity_FP32/infer"
        shared.put(sample("FP32", 4).tobytes())
        wish = {"name": "OUT", "parameters": place | {"shared_memory_offset": 32}}
        body = {"id": "1", "inputs": [{**given, "parameters": place}], "outputs": [wish]}
        assert post(infer, body) == (
            200,
            {
                "id": "1",
                "model_name": "identity_FP32",
                "model_version": "1",
                "outputs": [{"name": "OUT", "datatype": "FP32", "shape": [1, 4]}],
            },
        )
        assert shared.get(16, 32) == sample("FP32", 4).tobytes()
        for other, value in (("classification", 2), ("binary_data", True)):
            body = {
                "inputs": [{**given, "parameters": place}],
                "outputs": [{"name": "OUT", "parameters": {**place, other: value}}],
            }
            text = f"Output can't set both 'shared_memory_region' and '{other}'"
            assert post(infer, body) == error(400, text)
        assert post("/v2/systemsharedmemory/unregister", b"whatever") == (200, None)


def test_off_unless_allowed(tmp_path: Path) -> None:
    models = tmp_path / "models"
    write_identity(models, "identity_FP32", "FP32")
    with running(tmp_path, models) as server:
        text = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
        for protocol in ("http", "grpc"):
            client = StockClient(protocol, server)
            with client.client, memory(64) as shared:
                disabled = UNSUPPORTED[protocol], text
                assert client.refusal("register_system_shared_memory", "r", shared.key, 64) == disabled
                assert client.refusal("register_cuda_shared_memory", "r", b"AAAA", 0, 64) == disabled
                assert client.refusal("unregister_system_shared_memory") == disabled
                assert client.refusal("unregister_cuda_shared_memory", "r") == disabled
                assert client.status() == client.status("cuda") == {}
                inputs = [client.input("IN", (1, 4), "FP32", "r", 16)]
                expected = NOT_FOUND[protocol], "Unable to find shared memory region: 'r'"
                assert client.refusal("infer", "identity_FP32", inputs) == expected

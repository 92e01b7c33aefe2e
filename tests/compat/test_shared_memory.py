"""System shared memory over both protocols, with stock clients: what is shared, what is refused, and what survives."""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc.aio
import tritonclient.http.aio
from model_zoo import ONNX_TYPES, config_text, write_graph, write_identity, write_model, write_python_model, write_slow
from onnx import helper
from serving import Server, wait_until
from shared_regions import StockClient, content, memory, region, sample

from schemas.datatypes import DATATYPES

SHM = Path("/dev/shm")
NOT_FOUND = {"http": "404", "grpc": "NOT_FOUND"}
INVALID = {"http": "400", "grpc": "INVALID_ARGUMENT"}
INTERNAL = {"http": "500", "grpc": "INTERNAL"}
EXISTS = {"http": "400", "grpc": "ALREADY_EXISTS"}
UNSUPPORTED = {"http": "501", "grpc": "UNIMPLEMENTED"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("shm")
    models = folder / "models"
    for datatype in ONNX_TYPES:
        write_identity(models, f"identity_{datatype}", datatype, "dynamic_batching { }")
    for datatype in ("BF16", "FP32"):
        tensors = {"IN": (datatype, [-1])}, {"IN_OUT": (datatype, [-1])}
        write_python_model(models, f"python_{datatype}", "identity", *tensors, 8)
    write_slow(models)
    _write_add_sub(models)
    started = Server(folder, models, "--allow-client-shm=true")
    try:
        yield started
        assert started.in_flight() == 0
        assert started.stop() == 0
    finally:
        started.close()


def _write_add_sub(root: Path) -> None:
    tensors = {name: ("INT32", [4]) for name in "AB"}, {name: ("INT32", [4]) for name in ("SUM", "DIFFERENCE")}
    folder = write_model(root, "add_sub", config_text("add_sub", "onnxruntime", *tensors, 8))  # type: ignore[arg-type]
    nodes = [helper.make_node("Add", ["A", "B"], ["SUM"]), helper.make_node("Sub", ["A", "B"], ["DIFFERENCE"])]
    batched = [{name: (datatype, [-1, *dims]) for name, (datatype, dims) in t.items()} for t in tensors]
    write_graph(folder / "1" / "model.onnx", nodes, *batched)  # type: ignore[arg-type]


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[StockClient]:
    stock = StockClient(request.param, server)
    with stock.client:
        yield stock
        stock.client.unregister_system_shared_memory()
        wait_until(lambda: not stock.status())


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_in_and_out(client: StockClient, datatype: str) -> None:
    array = sample(datatype, 7)
    sent = content(array)
    model, out = ("python_BF16", "IN_OUT") if datatype == "BF16" else (f"identity_{datatype}", "OUT")
    with region(client, "in", 256, offset=32) as inputs, region(client, "out", 512) as outputs:
        inputs.put(sent, 32 + 64)
        result = client.client.infer(
            model,
            [client.input("IN", array.shape, datatype, "in", len(sent), 64)],
            outputs=[client.output(out, "out", 300, 100)],
        )
        described = result.get_output(out)
        shape = described["shape"] if client.protocol == "http" else list(described.shape)
        assert [int(dim) for dim in shape] == [1, 7]
        assert outputs.get(len(sent), 100) == sent
        # Nothing beside it was touched.
        assert outputs.get(100) == b"\xa5" * 100
        assert set(outputs.get(512 - 100 - len(sent), 100 + len(sent))) == {0xA5}


def test_many_tensors_in_one_region(client: StockClient) -> None:
    a, b = np.arange(4, dtype=np.int32).reshape(1, 4), np.full((1, 4), 10, np.int32)
    with region(client, "all", 64) as shared:
        shared.put(a.tobytes() + b.tobytes())
        client.client.infer(
            "add_sub",
            [client.input("A", (1, 4), "INT32", "all", 16), client.input("B", (1, 4), "INT32", "all", 16, 16)],
            outputs=[client.output("SUM", "all", 16, 32), client.output("DIFFERENCE", "all", 16, 48)],
        )
        assert shared.get(64) == b"".join(array.tobytes() for array in (a, b, a + b, a - b))


def test_either_side_alone(client: StockClient) -> None:
    array = sample("FP32", 6)
    with region(client, "r", 64) as shared:
        shared.put(array.tobytes())
        result = client.client.infer("identity_FP32", [client.input("IN", (1, 6), "FP32", "r", 24)])
        np.testing.assert_array_equal(result.as_numpy("OUT"), array)
        inputs = [client.data("IN", array * 2, "FP32")]
        client.client.infer("identity_FP32", inputs, outputs=[client.output("OUT", "r", 24, 32)])
        assert shared.get(24, 32) == (array * 2).tobytes()


@pytest.mark.parametrize("model,out", [("identity_FP32", "OUT"), ("python_FP32", "IN_OUT")])
def test_large_tensors(client: StockClient, server: Server, model: str, out: str) -> None:
    array = np.random.default_rng(4).random((1, 3 << 20), np.float32)
    segments = server.segments()
    with region(client, "large", 2 * array.nbytes) as shared:
        shared.put(array.tobytes())
        inputs = [client.input("IN", array.shape, "FP32", "large", array.nbytes)]
        outputs = [client.output(out, "large", array.nbytes, array.nbytes)]
        for _ in range(2):
            client.client.infer(model, inputs, outputs=outputs)
            assert shared.get(array.nbytes, array.nbytes) == array.tobytes()
            shared.put(bytes(array.nbytes), array.nbytes)
    assert server.segments() == segments, "its bytes took the way of other tensors"


def test_requests_that_share_a_batch(client: StockClient, server: Server) -> None:
    rows = [np.full((1, 70_000), number, np.float32) for number in range(6)]
    size = rows[0].nbytes
    with region(client, "rows", 12 * size) as shared:
        for number, row in enumerate(rows):
            shared.put(row.tobytes(), number * size)

        def ask(number: int) -> None:
            own = StockClient(client.protocol, server)
            with own.client:
                for _ in range(5):
                    own.client.infer(
                        "identity_FP32",
                        [own.input("IN", (1, 70_000), "FP32", "rows", size, number * size)],
                        outputs=[own.output("OUT", "rows", size, (6 + number) * size)],
                    )

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert shared.get(6 * size, 6 * size) == b"".join(row.tobytes() for row in rows)


def test_inputs_are_used_again_in_every_way(client: StockClient) -> None:
    first, second = sample("FP32", 4), sample("FP32", 4) + 1
    with region(client, "again", 64) as shared:
        tensor, wish = client.data("IN", first, "FP32"), client.output("OUT", "again", 16, 32)
        for _ in range(3):
            shared.put(second.tobytes())
            tensor.set_shared_memory("again", 16)
            client.client.infer("identity_FP32", [tensor], outputs=[wish])
            assert shared.get(16, 32) == second.tobytes()
            tensor.set_data_from_numpy(first)
            wish.unset_shared_memory()
            result = client.client.infer("identity_FP32", [tensor], outputs=[wish])
            np.testing.assert_array_equal(result.as_numpy("OUT"), first)
            wish.set_shared_memory("again", 16, 32)
            client.client.infer("identity_FP32", [tensor], outputs=[wish])
            assert shared.get(16, 32) == first.tobytes()
            result = client.client.infer("identity_FP32", [tensor])
            np.testing.assert_array_equal(result.as_numpy("OUT"), first)
        request = "identity_FP32", [client.data("IN", first, "FP32")]
        client.client.infer(*request, outputs=[wish])
    assert client.refusal("infer", *request, outputs=[wish]) == (
        NOT_FOUND[client.protocol],
        "Unable to find shared memory region: 'again'",
    )


def test_status(client: StockClient) -> None:
    assert client.status() == client.status("cuda") == {}
    with region(client, "one", 64, offset=16) as one, region(client, "two ö.*>", 32) as two:
        rows = {
            "one": {"name": "one", "key": one.key, "offset": 16, "byte_size": 64},
            "two ö.*>": {"name": "two ö.*>", "key": two.key, "offset": 0, "byte_size": 32},
        }
        assert client.status() == rows
        assert client.status(name="one") == {"one": rows["one"]}
        assert client.status("cuda") == {}
        refused = client.refusal("get_cuda_shared_memory_status", "one")
        text = "The region named 'one' is registered as system shared memory, not CUDA shared memory"
        assert refused == (NOT_FOUND[client.protocol], text)
        client.client.unregister_cuda_shared_memory("one")
        client.client.unregister_cuda_shared_memory()
        client.client.unregister_system_shared_memory("unknown")
        assert client.status() == rows
    for kind in ("system", "cuda"):
        refused = client.refusal(f"get_{kind}_shared_memory_status", "one")
        assert refused == (NOT_FOUND[client.protocol], f"Unable to find {kind} shared memory region: 'one'")


def test_registrations_that_are_refused(client: StockClient) -> None:
    register = "register_system_shared_memory"
    failed = "failed to register shared memory region 'r'"
    with memory(64) as shared, region(client, "taken", 64):
        cases: list[tuple[tuple[Any, ...], dict[str, str], str]] = [
            (("taken", shared.key, 64), EXISTS, "shared memory region 'taken' already in manager"),
            (("r", "/nobody", 8), INVALID, f"{failed}: Unable to open shared memory region: '/nobody'"),
            (("r", shared.key, 65), INVALID, f"{failed}: invalid args"),
            (("r", shared.key, 60, 5), INVALID, f"{failed}: invalid args"),
            (("r", shared.key, 2**64 - 1, 2), INVALID, f"{failed}: invalid args"),
            (("r", shared.key, 0), INVALID, f"{failed}: unable to process address spaceInvalid argument"),
        ]
        reserved = (
            "/triton_python_backend_shm_region_1",
            "weir-gateway.1",
            "/.weir-x",
            "///",
            "",
            "/..",
            "a/b",
            "\0",
            "/" * 2,
        )
        cases += [
            (("r", key, 8), INVALID, f"cannot register shared memory region 'r' - invalid shm key '{key}'")
            for key in (*reserved, "x" * 256)
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
            text = f"failed to register shared memory region 'r': Unable to open shared memory region: '{name}'"
            assert client.refusal("register_system_shared_memory", "r", name, 8) == (INVALID[client.protocol], text)
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


def test_objects_that_are_cut_off_or_removed_after_registration(client: StockClient, server: Server) -> None:
    pids = server.pids()
    size = 1 << 20
    with region(client, "r", size) as shared:
        name = shared.key[1:]
        shape = (1, size // 4)
        reading = [client.input("IN", shape, "FP32", "r", size)]
        writing = [client.data("IN", np.ones((1, 1024), np.float32), "FP32")]
        wish = [client.output("OUT", "r", 4096, size - 4096)]

        def refused(text: str) -> None:
            read = client.refusal("infer", "identity_FP32", reading)
            assert read == (INVALID[client.protocol], f"failed to read input 'IN': {text}")
            written = client.refusal("infer", "identity_FP32", writing, outputs=wish)
            assert written == (INTERNAL[client.protocol], f"failed to write output 'OUT': {text}")

        client.client.infer("identity_FP32", reading)
        os.truncate(SHM / name, size - 4096)
        refused(f"shared memory object '{name}' is smaller than it was when it was registered")
        os.truncate(SHM / name, 0)
        refused(f"shared memory object '{name}' is smaller than it was when it was registered")
        assert (SHM / name).stat().st_size == 0
        os.truncate(SHM / name, size)
        client.client.infer("identity_FP32", reading)
        (SHM / name).rename(SHM / f"{name}_old")
        refused(f"Unable to open shared memory region: '{name}'")
        (SHM / name).write_bytes(bytes(size))
        refused(f"shared memory object '{name}' is not the one that was registered")
        (SHM / name).unlink()
        (SHM / f"{name}_old").rename(SHM / name)
        client.client.infer("identity_FP32", reading)
    assert server.pids() == pids


def test_a_region_in_use_leaves_when_its_requests_are_over(client: StockClient, server: Server) -> None:
    with memory(64) as shared:
        client.client.register_system_shared_memory("busy", shared.key, 64)
        shared.put(np.int64(42).tobytes() + np.float32(700).tobytes())
        inputs = [
            client.input("VALUE", (1, 1), "INT64", "busy", 8),
            client.input("DELAY_MS", (1, 1), "FP32", "busy", 4, 8),
        ]
        done: list[Any] = []

        def ask() -> None:
            own = StockClient(client.protocol, server)
            with own.client:
                outputs = [own.output("VALUE_OUT", "busy", 8, 32)]
                done.append(own.client.infer("slow", inputs, outputs=outputs))

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: server.in_flight() == 1)
        client.client.unregister_system_shared_memory("busy")
        assert list(client.status()) == ["busy"], "it is in use"
        assert client.refusal("register_system_shared_memory", "busy", shared.key, 64)[0] == EXISTS[client.protocol]
        asking.join()
        assert done
        assert shared.get(8, 32) == np.int64(42).tobytes()
        wait_until(lambda: not client.status())
        client.client.register_system_shared_memory("busy", shared.key, 64)


def test_registrations_outlive_processes(client: StockClient, server: Server) -> None:
    array = sample("FP32", 4)
    with region(client, "lasting", 64) as shared:
        shared.put(array.tobytes())
        inputs = [client.input("IN", (1, 4), "FP32", "lasting", 16)]
        wish = [client.output("OUT", "lasting", 16, 32)]
        for role in ("worker", "gateway", "nats"):
            before = server.kill(role)
            wait_until(lambda old=before, name=role: server.pids().get(name) not in (None, old))
            server.wait_ready("identity_FP32")
            own = StockClient(client.protocol, server)
            with own.client:
                wait_until(lambda asked=own: "lasting" in asked.status())
                shared.put(bytes(16), 32)
                own.client.infer("identity_FP32", inputs, outputs=wish)
                assert shared.get(16, 32) == array.tobytes()


def test_gpu_memory_without_a_gpu(client: StockClient) -> None:
    refused = client.refusal("register_cuda_shared_memory", "g", base64.b64encode(bytes(64)), 0, 64)
    text = "failed to register CUDA shared memory region: 'g', GPUs not supported"
    assert refused == (INVALID[client.protocol], text)
    assert client.status("cuda") == {}
    client.client.unregister_cuda_shared_memory("g")


def test_grpc_repeats_where_an_output_lies(server: Server) -> None:
    client = StockClient("grpc", server)
    with client.client, region(client, "r", 64):
        inputs = [client.data("IN", sample("FP32", 4), "FP32")]
        answer = client.client.infer(
            "identity_FP32", inputs, outputs=[client.output("OUT", "r", 32, 16)]
        ).get_response()
        (output,) = answer.outputs
        parameters = output.parameters
        assert parameters["shared_memory_region"].string_param == "r"
        assert parameters["shared_memory_byte_size"].int64_param == 32
        assert parameters["shared_memory_offset"].int64_param == 16
        assert list(answer.raw_output_contents) == [b""]


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


async def test_aio_clients(server: Server) -> None:
    array = sample("FP32", 4)
    for module, place in ((tritonclient.http, server.http_place), (tritonclient.grpc, server.grpc_place)):
        with memory(64) as shared:
            shared.put(array.tobytes())
            async with module.aio.InferenceServerClient(place) as client:
                await client.register_system_shared_memory("aio", shared.key, 64)
                given = module.InferInput("IN", [1, 4], "FP32")
                given.set_shared_memory("aio", 16)
                wish = module.InferRequestedOutput("OUT")
                wish.set_shared_memory("aio", 16, 32)
                await client.infer("identity_FP32", [given], outputs=[wish])
                assert shared.get(16, 32) == array.tobytes()
                await client.unregister_system_shared_memory("aio")
                assert not await client.get_system_shared_memory_status(
                    **({} if module is tritonclient.http else {"as_json": True})
                )


def test_off_unless_allowed(tmp_path: Path) -> None:
    models = tmp_path / "models"
    write_identity(models, "identity_FP32", "FP32")
    server = Server(tmp_path, models)
    try:
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
        assert server.stop() == 0
    finally:
        server.close()

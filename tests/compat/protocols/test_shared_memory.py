"""System shared memory over both protocols with stock clients: registration, transfers, restarts."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio
import tritonclient.http.aio
from onnx import helper

from tests.support.clients.shared_memory import (
    EXISTS,
    INTERNAL,
    INVALID,
    NOT_FOUND,
    StockClient,
    content,
    memory,
    region,
    running,
    sample,
    stock_client,
)
from tests.support.models.zoo import (
    ONNX_TYPES,
    config_text,
    write_graph,
    write_identity,
    write_model,
    write_python_model,
    write_slow,
)
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until
from weir.schemas.core.tensors import DATATYPES

SHM = Path("/dev/shm")


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
    with running(folder, models, "--allow-client-shm=true") as started:
        yield started


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[StockClient]:
    with stock_client(request.param, server) as stock:
        yield stock


def _write_add_sub(root: Path) -> None:
    tensors = {name: ("INT32", [4]) for name in "AB"}, {name: ("INT32", [4]) for name in ("SUM", "DIFFERENCE")}
    folder = write_model(root, "add_sub", config_text("add_sub", "onnxruntime", *tensors, 8))  # type: ignore[arg-type]
    nodes = [helper.make_node("Add", ["A", "B"], ["SUM"]), helper.make_node("Sub", ["A", "B"], ["DIFFERENCE"])]
    batched = [{name: (datatype, [-1, *dims]) for name, (datatype, dims) in t.items()} for t in tensors]
    write_graph(folder / "1" / "model.onnx", nodes, *batched)  # type: ignore[arg-type]


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


def test_a_batch_that_dies_with_its_worker_is_done_again(client: StockClient, server: Server) -> None:
    with region(client, "again", 64) as shared:
        shared.put(np.int64(7).tobytes() + np.float32(400).tobytes())
        inputs = [
            client.input("VALUE", (1, 1), "INT64", "again", 8),
            client.input("DELAY_MS", (1, 1), "FP32", "again", 4, 8),
        ]

        def ask() -> None:
            own = StockClient(client.protocol, server)
            with own.client:
                own.client.infer("slow", inputs, outputs=[own.output("VALUE_OUT", "again", 8, 32)])

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: server.in_flight() == 1)
        server.kill("worker")
        asking.join()
        assert shared.get(8, 32) == np.int64(7).tobytes()
        server.wait_ready()


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

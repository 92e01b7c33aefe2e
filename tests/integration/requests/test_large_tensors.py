"""Tensors too large for messages: correct in both directions, in memory that is reused and does not leak."""

from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http

from tests.support.clients.stock import grpc_inputs, http_inputs
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

PICTURE = (1, 3 * 224 * 224)  # 602 112 bytes of FP32
FIVE_MB = (1, 1_310_720)

Http = tritonclient.http.InferenceServerClient
Grpc = tritonclient.grpc.InferenceServerClient


def shared_bytes(server: Server) -> int:
    """Memory that the server's payload segments take up."""
    return sum(Path("/dev/shm", name).stat().st_blocks * 512 for name in server.segments())


def resident_bytes(server: Server) -> int:
    pids = server.pids()
    return sum(psutil.Process(pids[role]).memory_info().rss for role in ("gateway", "worker", "scheduler", "nats"))


@pytest.mark.parametrize("shape", [PICTURE, FIVE_MB], ids=["602 KB", "5 MB"])
@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_http(http: Http, shape: tuple[int, int], binary: bool) -> None:
    if not binary and shape == FIVE_MB:
        shape = (1, 300_000)
    array = np.random.default_rng(1).random(shape, np.float32)
    outputs = [tritonclient.http.InferRequestedOutput("OUT", binary_data=binary)]
    result = http.infer("identity_FP32", http_inputs({"IN": array}, binary=binary), outputs=outputs)
    np.testing.assert_array_equal(result.as_numpy("OUT"), array)


@pytest.mark.parametrize("shape", [PICTURE, FIVE_MB], ids=["602 KB", "5 MB"])
def test_grpc(grpc: Grpc, shape: tuple[int, int]) -> None:
    array = np.random.default_rng(2).random(shape, np.float32)
    np.testing.assert_array_equal(grpc.infer("identity_FP32", grpc_inputs({"IN": array})).as_numpy("OUT"), array)


def test_python_models_get_and_give_them_too(http: Http, grpc: Grpc) -> None:
    array = (np.arange(1_000_000, dtype=np.uint16) % 128).view("<u2").reshape(1, -1)
    for result in (
        http.infer("identity_BF16", _bf16_over_http(array)),
        grpc.infer("identity_BF16", _bf16_over_grpc(array)),
    ):
        assert result.as_numpy("IN_OUT").tobytes() == array.tobytes()


def _bf16_over_http(array: np.ndarray) -> list[tritonclient.http.InferInput]:
    given = tritonclient.http.InferInput("IN", list(array.shape), "BF16")
    given._raw_data = array.tobytes()
    given._parameters["binary_data_size"] = array.nbytes
    return [given]


def _bf16_over_grpc(array: np.ndarray) -> list[tritonclient.grpc.InferInput]:
    given = tritonclient.grpc.InferInput("IN", list(array.shape), "BF16")
    given._raw_content = array.tobytes()
    return [given]


def test_large_bytes_tensors(http: Http) -> None:
    array = np.array([[b"x" * 100_000, b"", b"y" * 200_000]], np.object_)
    result = http.infer("identity_BYTES", http_inputs({"IN": array}))
    np.testing.assert_array_equal(result.as_numpy("OUT"), array)


@pytest.mark.parametrize("rows", [1, 4])
def test_slots_are_used_again(server: Server, http: Http, grpc: Grpc, rows: int) -> None:
    random = np.random.default_rng(3)

    def ask(times: int) -> None:
        for number in range(times):
            array = random.random((rows, PICTURE[1]), np.float32)
            if number % 4:
                result = http.infer("identity_FP32", http_inputs({"IN": array}))
            else:
                result = grpc.infer("identity_FP32", grpc_inputs({"IN": array}))
            assert result.as_numpy("OUT").tobytes() == array.tobytes()

    ask(20)
    shared, resident = shared_bytes(server), resident_bytes(server)
    assert shared > 0, "large tensors go through shared memory"
    ask(200 // rows)
    # A slot comes back by a message after the answer: a second one may be needed meanwhile.
    assert shared_bytes(server) <= shared + 2 * (4 << 20)
    assert resident_bytes(server) < resident + (48 << 20)


def test_more_than_fits_into_a_message(grpc: Grpc) -> None:
    # 16 MiB in and out: larger than any message of the bus, so it can only be by reference.
    array = np.arange(4 << 20, dtype=np.float32).reshape(1, -1)
    np.testing.assert_array_equal(grpc.infer("identity_FP32", grpc_inputs({"IN": array})).as_numpy("OUT"), array)


def test_a_dead_worker_s_memory_is_removed_by_its_successor(hurt: Server) -> None:
    array = np.ones(PICTURE, np.float32)
    with hurt.http() as client:
        client.infer("identity_FP32", http_inputs({"IN": array}))
        before = hurt.segments()
        worker = hurt.kill("worker")
        wait_until(lambda: hurt.pids().get("worker") not in (None, worker))
        result = client.infer("identity_FP32", http_inputs({"IN": array}))
    np.testing.assert_array_equal(result.as_numpy("OUT"), array)
    left = {name for name in before if Path("/dev/shm", name).exists()}
    assert left < before
    assert all("gateway" in name for name in left)

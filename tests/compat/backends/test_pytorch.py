"""PyTorch models through a running server, as stock clients see them, and a model with a process of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from tests.support.models.torch_files import export, script
from tests.support.models.zoo import write_identity
from tests.support.own_process import later, run_in_own_process
from tests.support.servers.weir_server import Server

torch = later("torch")
networks = later("tests.support.models.torch_networks")

SCRIPT = """
backend: "pytorch"
max_batch_size: 8
input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "INPUT__1" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "OUTPUT__1" data_type: TYPE_FP32 dims: [ -1 ] } ]
dynamic_batching { max_queue_delay_microseconds: 200000 preferred_batch_size: [ 8 ] }
instance_group [ { kind: KIND_CPU count: 2 } ]
"""
ISOLATED = 'parameters { key: "isolation" value { string_value: "process" } }'


def write_networks(folder: str) -> None:
    """The files of `script` and `program`."""
    script(Path(folder, "script"), networks.AddSub())
    width = torch.export.Dim("width", min=1, max=1_000_000)
    batch = torch.export.Dim("batch", min=1, max=8)
    shapes = ({0: batch, 1: width}, {0: batch, 1: width})
    export(Path(folder, "program"), networks.AddSub(), (torch.ones(2, 3), torch.ones(2, 3)), dynamic_shapes=shapes)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("torch")
    models = {name: folder / "models" / name for name in ("script", "program")}
    for path in models.values():
        path.mkdir(parents=True)
    run_in_own_process(write_networks, str(folder / "models"))
    (models["script"] / "config.pbtxt").write_text(SCRIPT)
    write_identity(folder / "models", "isolated", "FP32", ISOLATED)
    # The folder of PyTorch's own compiler outlives every process that imports it, so it is not the server's to remove.
    with Server(
        folder, folder / "models", environment={"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiler")}
    ) as started:
        yield started
        assert started.in_flight() == 0


def numbers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random(shape, np.float32)


def inputs(*names: str, shape: tuple[int, ...], seed: int = 0) -> list[tritonclient.grpc.InferInput]:
    made = [tritonclient.grpc.InferInput(name, list(shape), "FP32") for name in names]
    for position, tensor in enumerate(made):
        tensor.set_data_from_numpy(numbers(shape, seed + position))
    return made


def check(result: tritonclient.grpc.InferResult, shape: tuple[int, ...], seed: int = 0) -> None:
    a, b = numbers(shape, seed), numbers(shape, seed + 1)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT__0"), a + b)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT__1"), a - b)


def asked(
    client: tritonclient.grpc.InferenceServerClient,
    model: str,
    names: tuple[str, ...],
    shape: tuple[int, ...],
    seed: int,
) -> Future[tritonclient.grpc.InferResult]:
    """A request that is on its way."""
    answer: Future[tritonclient.grpc.InferResult] = Future()

    def done(result: tritonclient.grpc.InferResult | None, error: InferenceServerException | None) -> None:
        answer.set_result(result) if error is None else answer.set_exception(error)

    client.async_infer(model, inputs(*names, shape=shape, seed=seed), done)
    return answer


def test_a_script_is_batched(server: Server) -> None:
    with server.grpc() as client:
        calls = [asked(client, "script", ("INPUT__0", "INPUT__1"), (1, 16), seed) for seed in range(8)]
        for seed, call in enumerate(calls):
            check(call.result(20), (1, 16), seed)
        (statistics,) = client.get_inference_statistics("script", as_json=True)["model_stats"]
        assert int(statistics["inference_count"]) == 8
        assert int(statistics["execution_count"]) < 8


def test_a_program_needs_no_configuration(server: Server) -> None:
    with server.grpc() as client:
        config = client.get_model_config("program", as_json=True)["config"]
        assert (config["backend"], config["platform"], config["max_batch_size"]) == ("pytorch", "torch_aoti", 4)
        assert [tensor["name"] for tensor in config["input"]] == ["a", "b"]
        assert "dynamic_batching" in config
        for shape in ((1, 3), (4, 100_000)):
            check(client.infer("program", inputs("a", "b", shape=shape)), shape)
        with pytest.raises(InferenceServerException, match="the model rejects its inputs: Guard failed") as raised:
            client.infer("program", inputs("a", shape=(1, 3)) + inputs("b", shape=(1, 4)))
        assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_the_killed_process_of_another_backend_takes_no_request_along(server: Server) -> None:
    pids = server.pids()
    (process,) = server.python_children()
    with server.grpc() as client:
        client.infer("isolated", inputs("IN", shape=(1, 50_000)))
        calls = [asked(client, "isolated", ("IN",), (1, 50_000), seed) for seed in range(4)]
        os.kill(process, signal.SIGKILL)
        for seed, call in enumerate(calls):
            np.testing.assert_array_equal(call.result(30).as_numpy("OUT"), numbers((1, 50_000), seed))
        client.infer("isolated", inputs("IN", shape=(1, 3)))
    assert server.pids() == pids
    assert server.python_children() != [process]

"""`weir serve` from start to stop: failures of the start, and that nothing is left afterwards."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http

from tests.support.clients.stock import RawConnection, http_inputs, infer_body, post
from tests.support.models.zoo import write_identity, write_model, write_python_model, write_slow
from tests.support.servers.weir_server import Server, alive, clean_environment
from tests.support.waiting import wait_until

Serve = Callable[..., Server]

FREE_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")


def complaint(tmp_path: Path, *options: str) -> str:
    """What `weir serve` says before it ends with status 1."""
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "weir", "serve", *options],
        env=clean_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert not list((tmp_path / "tmp").iterdir())
    return ran.stderr


@pytest.mark.parametrize("protocol", ["http", "grpc", "metrics"])
def test_a_taken_port(tmp_path: Path, protocol: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        reply = complaint(tmp_path, f"--model-repository={tmp_path}", *FREE_PORTS, f"--{protocol}-port={port}")
    assert reply.startswith("error: can't listen for ")
    assert reply.endswith(f" requests at 127.0.0.1:{port}: the port is in use\n")


def test_a_missing_repository(tmp_path: Path) -> None:
    reply = complaint(tmp_path, f"--model-repository={tmp_path / 'nowhere'}", *FREE_PORTS)
    assert reply == f"error: model repository {tmp_path / 'nowhere'} is not a folder\n"


def test_a_missing_repository_is_served_around_where_errors_are_not_to_end_the_server(
    serve: Serve, tmp_path: Path
) -> None:
    write_identity(tmp_path / "models", "good", "FP32")
    server = serve(tmp_path / "models", f"--model-repository={tmp_path / 'nowhere'}", "--exit-on-error=false")
    assert server.is_ready("good")
    assert not server.is_ready()
    assert "failed to read model repository 'nowhere': No such file or directory" in server.log()


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--trace-config=level=NONSENSE", "NONSENSE"),
        ("--metrics-config=nonsense", "nonsense"),
        ("--grpc-use-ssl", "--grpc-server-cert"),
        ("--http-restricted-api=nonsense:key=value", "nonsense"),
    ],
)
def test_options_of_the_gateway_are_checked_before_models_are_loaded(tmp_path: Path, option: str, reason: str) -> None:
    write_slow(tmp_path / "models")
    reply = complaint(tmp_path, f"--model-repository={tmp_path / 'models'}", *FREE_PORTS, option)
    assert reason in reply
    assert "loading: slow" not in reply
    assert len(reply.splitlines()) == 1


def test_broken_models_leave_the_others_alone(serve: Serve, tmp_path: Path) -> None:
    models = tmp_path / "models"
    write_identity(models, "good", "FP32")
    tensors = {"IN": ("FP32", [1])}, {"OUT": ("FP32", [1])}
    write_python_model(models, "raises", "unloadable", *tensors)
    write_model(models, "misspelt", 'name: "misspelt"\nbackend: "onnxruntime"\nmax_batchsize: 1\n')
    (write_identity(models, "not_onnx", "FP32") / "1" / "model.onnx").write_bytes(b"not a model at all")
    (models / "empty").mkdir()
    server = serve(models)
    rows = {line.split()[0]: line for line in server.printed().splitlines() if line.strip()}
    assert rows["good"].split()[1:] == ["1", "READY"]
    assert "the weights are nowhere to be found" in rows["raises"]
    assert "misspelt/config.pbtxt:3" in rows["misspelt"]
    assert "max_batchsize" in rows["misspelt"]
    for name in ("raises", "misspelt", "not_onnx", "empty"):
        assert "UNAVAILABLE" in rows[name], name
        assert not server.is_ready(name)
        status, body = server.get(f"/v2/models/{name}")
        assert status == 404
        assert json.loads(body)["error"].startswith(f"Request for unknown model: '{name}' ")
    assert not server.is_ready()
    assert server.is_ready("good")
    value = np.ones((1, 3), np.float32)
    with server.http() as client:
        assert client.is_server_live()
        np.testing.assert_array_equal(client.infer("good", http_inputs({"IN": value})).as_numpy("OUT"), value)
        with pytest.raises(tritonclient.utils.InferenceServerException) as refused:
            client.infer("raises", http_inputs({"IN": np.ones(1, np.float32)}))
        assert refused.value.status() in ("404", "503")


def test_exit_on_error_names_the_broken_model(tmp_path: Path) -> None:
    write_identity(tmp_path / "models", "good", "FP32")
    write_model(tmp_path / "models", "broken", "max_batch_size: x")
    reply = complaint(tmp_path, f"--model-repository={tmp_path / 'models'}", *FREE_PORTS, "--exit-on-error")
    assert reply.splitlines()[-1].startswith("error: failed to load 'broken'")


def test_exit_on_error_names_a_model_for_devices_that_no_worker_has(tmp_path: Path) -> None:
    group = "instance_group { kind: KIND_GPU gpus: [ 42 ] }"
    tensors = {"IN": ("FP32", [1])}, {"OUT": ("FP32", [1])}
    write_python_model(tmp_path / "models", "elsewhere", "identity", *tensors, more=group)
    reply = complaint(tmp_path, f"--model-repository={tmp_path / 'models'}", *FREE_PORTS, "--exit-on-error")
    assert reply.splitlines()[-1].startswith("error: failed to load 'elsewhere': ")


def test_exit_on_error_names_a_start_up_model_that_is_nowhere(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    explicit = ("--model-control-mode=explicit", "--load-model=nobody", "--exit-on-error")
    reply = complaint(tmp_path, f"--model-repository={tmp_path / 'models'}", *FREE_PORTS, *explicit)
    assert reply.splitlines()[-1] == "error: failed to load 'nobody': model not found in any model repository"


def test_an_empty_repository_is_served_until_ctrl_c(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    server = serve(tmp_path / "models")
    assert server.is_ready()
    assert "no models" in server.printed()
    assert server.stop(signal.SIGINT) == 0


def test_sigterm_lets_requests_end_and_stops_then(serve: Serve, tmp_path: Path) -> None:
    write_slow(tmp_path / "models")
    server = serve(tmp_path / "models", f"--data-dir={tmp_path / 'data'}", "--exit-timeout-secs=600")
    arrays = {"VALUE": np.array([[3]], np.int64), "DELAY_MS": np.array([[800]], np.float32)}
    with RawConnection(server.port) as connection:
        connection.send(post("/v2/models/slow/infer", infer_body(arrays)))
        wait_until(lambda: server.in_flight() == 1)
        assert server.stop() == 0
        answer = connection.answer()
    assert answer is not None
    assert answer.document["outputs"][0]["data"] == [3]
    assert (tmp_path / "data" / "jetstream").is_dir(), "a folder that was named is kept"


def test_a_stop_ends_with_the_request_of_a_client_that_has_disconnected(serve: Serve, tmp_path: Path) -> None:
    """The gateway is gone long before the model has run it; the scheduler waits for it, and not for the exit timeout."""
    write_slow(tmp_path / "models")
    server = serve(tmp_path / "models", "--exit-timeout-secs=10")
    arrays = {"VALUE": np.array([[3]], np.int64), "DELAY_MS": np.array([[1500]], np.float32)}
    with RawConnection(server.port) as connection:
        connection.send(post("/v2/models/slow/infer", infer_body(arrays)))
        wait_until(lambda: server.in_flight() == 1)
    wait_until(lambda: server.in_flight() == 0)
    assert server.stop() == 0  # 1 if a process had to be killed after the exit timeout
    assert "has not stopped in time" not in server.log()


def test_requests_longer_than_the_exit_timeout_are_given_up(serve: Serve, tmp_path: Path) -> None:
    write_slow(tmp_path / "models")
    server = serve(tmp_path / "models", "--exit-timeout-secs=1")
    arrays = {"VALUE": np.array([[3]], np.int64), "DELAY_MS": np.array([[600_000]], np.float32)}
    with RawConnection(server.port) as connection:
        connection.send(post("/v2/models/slow/infer", infer_body(arrays)))
        wait_until(lambda: server.in_flight() == 1)
        server.stop()
        answer = connection.answer()
    assert answer is None or answer.status == 503


def test_nothing_outlives_a_killed_parent(serve: Serve, tmp_path: Path) -> None:
    write_slow(tmp_path / "models")
    server = serve(tmp_path / "models")
    processes = [process.pid for process in server.processes()]
    assert len(processes) == 8, (
        "parent, nats-server, four roles, the process that forks Python models, and a Python model"
    )
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    wait_until(lambda: not any(alive(pid) for pid in processes))


def test_it_listens_on_loopback_only(server: Server) -> None:
    listening = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in server.processes()
        for connection in process.net_connections()
        if connection.status == "LISTEN"
    }
    assert listening == {"127.0.0.1"}

"""`weir.Server`: a server of a Python program, from start to stop, whatever stops it."""

import asyncio
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import textwrap
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.http

from tests.support.access.served import weir
from tests.support.models.zoo import write_identity, write_model, write_slow
from tests.support.servers.certificates import Authority
from tests.support.servers.weir_server import alive, segments_of
from tests.support.waiting import wait_until
from weir import Server, StartError, WeirError
from weir.client import Client
from weir.schemas.core.errors import ErrorCode
from weir.server_process import PARENT_PID

BIG = 300_000
"""Floats of a tensor that goes through shared memory."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("python_server")
    write_identity(root, "identity", "FP32")
    write_identity(root, "strings", "BYTES")
    write_slow(root)
    return root


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all that only ask; the environment's settings of ours don't reach it."""
    folder = tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIR_NATS_URL", "nats://127.0.0.1:1")
        patch.setenv("TMPDIR", str(folder))
        started = Server(models, http_thread_count=4, trace_level="OFF", id="mine")
        # It must outlive the thread that has started it, which the parent-death signal would not let it.
        thread = threading.Thread(target=started.start)
        thread.start()
        thread.join()
    processes = family(started.pid)
    started.infer("identity", {"IN": np.zeros((1, BIG), np.float32)})
    segments = segments_of(processes)
    assert started.tls_cert == ""
    assert len(processes) == 8, "supervisor, nats-server, four roles, the fork server, and the Python model"
    assert segments
    assert list(folder.iterdir()), "its data"
    yield started
    started.stop()
    assert not any(alive(pid) for pid in processes)
    assert not any(Path("/dev/shm", name).exists() for name in segments)
    assert list(folder.iterdir()) == []


def family(pid: int) -> list[int]:
    parent = psutil.Process(pid)
    return [process.pid for process in (parent, *parent.children(recursive=True))]


def test_infer(server: Server) -> None:
    value = np.random.default_rng(0).random((2, BIG // 2), np.float32)
    result = server.infer("identity", {"IN": value}, ["OUT"], request_id="r", model_version=1)
    np.testing.assert_array_equal(result["OUT"], value)
    assert (result.id, result.model_version) == ("r", "1")
    assert server.infer("strings", {"IN": [["ä", "b\0c"]]})["OUT"].tolist() == [["ä".encode(), b"b\0c"]]


def test_errors(server: Server) -> None:
    with pytest.raises(WeirError, match="'nowhere' is not found"):
        server.infer("nowhere", {})
    with pytest.raises(WeirError, match="inference input"):
        server.infer("identity", {"IM": np.zeros((1, 1), np.float32)})


def test_what_it_tells_of_itself(server: Server) -> None:
    assert server.ready()
    assert server.ready("identity")
    assert not server.ready("nowhere")
    assert server.metadata()["name"] == "mine"
    assert server.metadata("identity")["inputs"][0]["datatype"] == "FP32"
    assert server.config("identity")["max_batch_size"] == 8
    assert server.http_url == f"http://{server.http_address}"
    assert server.metrics_url.endswith("/metrics")
    assert re.fullmatch(r"nats://weir:[^@]+@127\.0\.0\.1:\d+", server.nats_url)
    with tritonclient.http.InferenceServerClient(server.http_address) as client:
        assert client.is_server_ready()


def test_options_without_effect_and_deprecated_ones_are_told_in_its_log(server: Server) -> None:
    log = server.log()
    assert "--http-thread-count has no effect: a gateway serves requests from one event loop" in log
    assert "'--trace-level' has been deprecated and will be removed in future releases" in log


async def test_many_at_a_time_from_an_event_loop(server: Server) -> None:
    arrays = [{"VALUE": ([[number]], "INT64"), "DELAY_MS": ([[20]], "FP32")} for number in range(8)]
    results = await asyncio.gather(*(server.ainfer("slow", one) for one in arrays))
    assert [int(result["VALUE_OUT"][0, 0]) for result in results] == list(range(8))
    await server.aclose()


@pytest.mark.parametrize("is_given", [False, True], ids=["self-signed", "of an authority"])
def test_with_tls_it_is_asked_like_any_other(models: Path, tmp_path: Path, is_given: bool) -> None:
    pair = Authority(tmp_path).sign("server")
    given = {"tls_cert": pair.cert, "tls_key": pair.key} if is_given else {"tls_self_signed": True}
    value = {"IN": np.ones((1, 4), np.float32)}
    with Server(models, **given) as server:
        assert server.infer("identity", value)["OUT"].tolist() == [[1.0] * 4]
        assert asyncio.run(server.ainfer("identity", value))["OUT"].tolist() == [[1.0] * 4]
        assert server.http_url == f"https://{server.http_address}"
        assert server.metrics_url.startswith("https://")
        context = ssl.create_default_context(cafile=tmp_path / "authority.pem" if is_given else server.tls_cert)
        with urllib.request.urlopen(server.metrics_url, context=context) as page:
            assert b"nv_inference_count" in page.read()


def test_a_broken_model_is_an_error_of_the_start(tmp_path: Path) -> None:
    write_model(tmp_path, "broken", "max_batch_size: x")
    with pytest.raises(StartError) as refused:
        Server(tmp_path).start()
    reply = str(refused.value).splitlines()
    assert reply[0].startswith("the server can't start: failed to load 'broken'")
    assert "worker is ready" not in str(refused.value)
    assert any("broken" in line for line in reply[1:]), "the last lines of the log"


def test_a_wrong_option_is_told() -> None:
    with pytest.raises(TypeError, match=r"^unknown option 'http_prot'; did you mean 'http_port'\?$"):
        Server("models", http_prot=1)
    with pytest.raises(StartError, match="model repository nowhere is not a folder"):
        Server("nowhere").start()
    with pytest.raises(StartError, match=r'Bad option: "--http-port"\. Invalid option value\. Got x'):
        Server("nowhere", http_port="x").start()
    with pytest.raises(StartError, match="not running"):
        _ = Server("models").http_url


PROGRAM = """
    import os, sys, signal
    from weir import Server
    server = Server(sys.argv[1]).start()
    print(server.pid, flush=True)
    {end}
"""


@pytest.mark.parametrize(
    "end",
    ["raise RuntimeError('oh')", "os.fork(); sys.stdin.read()"],
    ids=["raises", "is killed while a fork of it lives on"],
)
def test_nothing_outlives_the_program(tmp_path: Path, end: str) -> None:
    (tmp_path / "tmp").mkdir()
    write_identity(tmp_path / "models", "identity", "FP32")
    (tmp_path / "project").mkdir()
    for name in ("schemas", "worker", "client", "jobs", "bus"):  # of the program's own, on its path and on the server's
        (tmp_path / "project" / f"{name}.py").write_text("raise ImportError('not this one')")
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM.format(end=end)), str(tmp_path / "models")],
        cwd=tmp_path / "project",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(tmp_path / "project")},
        text=True,
    )
    with program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        if "read" in end:
            processes = family(pid)
            assert len(processes) == 6
            program.send_signal(signal.SIGKILL)
        else:
            processes = [pid]
        wait_until(lambda: not any(alive(one) for one in processes), 25)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_program_that_has_ended_already_is_not_served(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "weir", "serve", f"--model-repository={tmp_path}", "--http-port=0"],
        env={**os.environ, PARENT_PID: "1"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ran.returncode == 1
    assert "the program that started this server has exited" in ran.stderr


def test_a_server_with_a_policy_lets_in_the_key(models: Path, tmp_path: Path) -> None:
    policy, keys = tmp_path / "policy.yaml", tmp_path / "keys.json"
    rules = {"anonymous": [{"actions": ["health"]}], "caller": [{"model": "identity", "actions": ["infer"]}]}
    policy.write_text(json.dumps({"roles": {role: {"rules": each} for role, each in rules.items()}}))
    made = weir(tmp_path, "key", "create", "test", "--role=caller", f"--file={keys}")
    assert made.returncode == 0, made.stderr
    (tmp_path / "key").write_text(made.stdout)
    inputs = {"IN": np.ones((1, 2), np.float32)}
    with Server(models, access_policy=policy, access_keys=keys, api_key=f"@{tmp_path}/key") as server:
        assert server.infer("identity", inputs)["OUT"].tolist() == [[1, 1]]
        with pytest.raises(WeirError) as hidden:
            server.infer("strings", inputs)
        assert hidden.value.code is ErrorCode.NOT_FOUND
        stranger = Client(server.grpc_url)
        with pytest.raises(WeirError) as refused:
            stranger.infer("identity", inputs)
        stranger.close()
        assert refused.value.code is ErrorCode.UNAUTHENTICATED
        assert made.stdout.strip() not in server.log()

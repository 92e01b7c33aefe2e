"""Broker credentials are hidden from the code of models and from process listings."""

from __future__ import annotations

import json
import secrets
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
from tritonclient.utils import InferenceServerException

import weir
from tests.support.clients.stock import http_inputs
from tests.support.models.zoo import write_python_model
from tests.support.servers import weir_server as serving
from tests.support.servers.forked_commands import COMMAND
from tests.support.servers.nats import GivenNats
from tests.support.servers.trace_collector import Collector
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until
from weir.options import options_of
from weir.options.secret import Secret


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GivenNats]:
    user = {"user": "weir", "password": "of-admin"}
    server = GivenNats(tmp_path_factory.mktemp("broker"), monitor=False, max_payload=8 << 20, authorization=user)
    yield server
    server.stop()


@pytest.mark.parametrize("way", ["url", "variables"])
@pytest.mark.timeout(90)
def test_a_model_sees_no_password(nats: GivenNats, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_python_model(tmp_path / "models", "prying", "prying", {"IN": ("INT32", [1])}, {"OUT": ("STRING", [1])}, 1)
    place = nats.url.removeprefix("nats://")
    url = f"nats://weir:of-admin@{place}" if way == "url" else nats.url
    given = {} if way == "url" else {"WEIR_NATS_USER": "weir", "WEIR_NATS_PASSWORD": "of-admin"}
    clean = serving.clean_environment
    monkeypatch.setattr(serving, "clean_environment", lambda folder: {**clean(folder), **given})
    server = Server(tmp_path, tmp_path / "models", f"--nats={url}")
    try:
        with server.http() as client:
            one = {"IN": np.zeros((1, 1), np.int32)}
            [[reply]] = client.infer("prying", http_inputs(one)).as_numpy("OUT")
        names, seen = json.loads(reply)
        assert not [name for name in names if name.startswith(("WEIR_", "NATS_"))]
        assert [text for text in seen if "weir" in text], "the model could read nothing of those above it"
        assert not [text for text in seen if "of-admin" in text]
        for process in server.processes():
            folder = Path("/proc", str(process.pid))
            assert b"of-admin" not in (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        # A role that comes back is let in as the one before.
        server.kill("worker")
        wait_until(lambda: "worker" in server.pids() and server.is_ready("prying"))
    finally:
        assert server.stop() == 0


class Secrets:
    """Random secrets, and files that hold them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(mode=0o700)
        self.all: dict[str, str] = {"password of NATS": "of-admin"}

    def make(self, name: str) -> str:
        """A new secret."""
        self.all[name] = f"hush-{secrets.token_hex(12)}"
        return self.all[name]

    def file(self, name: str, line: str) -> str:
        """`@FILE` for a file with this line."""
        path = self._folder / name
        path.write_text(f"{line}\na second line that nobody reads\n")
        path.chmod(0o600)
        return f"@{path}"

    def found_in(self, text: str) -> list[str]:
        """The names of the secrets that `text` shows."""
        return [name for name, secret in self.all.items() if secret in text]


@pytest.fixture
def collector() -> Iterator[Collector]:
    listening = Collector()
    yield listening
    listening.close()


def shown_by_proc(pid: int) -> str:
    """The command lines and environments of a process and all that it has started, as other processes read them."""
    parent = psutil.Process(pid)
    processes = [parent, *parent.children(recursive=True)]
    assert len(processes) > 5
    files = (Path("/proc", str(one.pid), name) for one in processes for name in ("cmdline", "environ"))
    return "\n".join(file.read_bytes().decode(errors="replace") for file in files)


def asked(server: Server, request: urllib.request.Request) -> str:
    """The status and the body of a response, whatever the status."""
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return f"{response.status} {response.read().decode()}"
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"


@pytest.mark.timeout(120)
def test_secrets_from_files_are_shown_nowhere(nats: GivenNats, collector: Collector, tmp_path: Path) -> None:
    hidden = Secrets(tmp_path / "secrets")
    write_python_model(tmp_path / "models", "prying", "prying", {"IN": ("INT32", [1])}, {"OUT": ("STRING", [1])}, 1)
    write_python_model(tmp_path / "models", "faulty", "faulty", {"WHAT": ("STRING", [1])}, {"SAID": ("STRING", [1])})
    place, collecting = nats.url.removeprefix("nats://"), urlsplit(collector.url)
    trace_key, http_key, grpc_key = hidden.make("trace"), hidden.make("http"), hidden.make("grpc")
    lines = {
        "nats": f"nats://weir:of-admin@{place}",
        "http-restricted-api": f"logging:admin-key={http_key}",
        "grpc-restricted-protocol": f"logging:admin-key={grpc_key}",
        "trace-config": f"opentelemetry,url=http://u:{trace_key}@{collecting.netloc}{collecting.path}",
        "backend-config": f"some-backend,key={hidden.make('backend')}",
        "nats-monitor": f"http://u:{hidden.make('monitor')}@127.0.0.1:9",
    }
    assert lines.keys() == {
        option.name[2:] for option in options_of("serve").values() if isinstance(option.value, Secret)
    }
    variables = {
        "WEIR_API_KEY": hidden.make("API key"),
        "OTEL_EXPORTER_OTLP_HEADERS": f"x-key={hidden.make('headers of traces')}",
    }
    server = Server(
        tmp_path,
        tmp_path / "models",
        *(f"--{name}={hidden.file(name, line)}" for name, line in lines.items()),
        "--trace-config=mode=opentelemetry",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config=rate=1",
        "--trace-config=opentelemetry,bsp_schedule_delay=100",
        "--log-verbose=3",
        environment=variables,
        before=("env",),  # as users start it, not as a fork
    )
    try:
        base = f"http://127.0.0.1:{server.port}"
        with server.http() as client:
            [[reply]] = client.infer("prying", http_inputs({"IN": np.zeros((1, 1), np.int32)})).as_numpy("OUT")
        names, seen = json.loads(reply)
        assert not [name for name in names if name.startswith(("WEIR_", "OTEL_"))]
        one = json.dumps({"inputs": [{"name": "WHAT", "datatype": "BYTES", "shape": [1], "data": ["raise"]}]}).encode()
        answers = [
            asked(server, urllib.request.Request(f"{base}{path}", data, headers))
            for path, data, headers in (
                ("/v2/models/faulty/infer", one, {}),
                ("/v2/models/prying/infer", b"{", {}),
                ("/v2/logging", None, {}),
                ("/v2/logging", None, {"admin-key": "wrong"}),
                ("/v2/logging", None, {"admin-key": http_key}),
                ("/v2/trace/setting", None, {}),
                ("/v2", None, {}),
                ("/v2/models/prying/config", None, {}),
                ("/v2/models/stats", None, {}),
                ("/openapi.json", None, {}),
            )
        ]
        assert [answer[:3] for answer in answers] == ["500", "500", "403", "403", *["200"] * 6], answers
        with server.grpc() as client:
            client.get_log_settings(headers={"triton-grpc-protocol-admin-key": grpc_key})
            with pytest.raises(InferenceServerException, match="This protocol is restricted"):
                client.get_log_settings(headers={"triton-grpc-protocol-admin-key": "wrong"})
        wait_until(collector.trace_ids)
        assert collector.headers["x-key"] == hidden.all["headers of traces"], "the collector must get them"
        status = subprocess.run(
            [*COMMAND, "status", "--json", f"--nats={hidden.file('nats', lines['nats'])}"],
            capture_output=True,
            text=True,
            check=False,
            env=serving.clean_environment(tmp_path),
        )
        assert json.loads(status.stdout)["models"], status.stderr
        doctor = subprocess.run(
            [*COMMAND, "doctor", "--json"],
            capture_output=True,
            text=True,
            check=False,
            env={**serving.clean_environment(tmp_path), **variables},
        )
        assert json.loads(doctor.stdout)
        shown = {
            "doctor": doctor.stdout + doctor.stderr,
            "/proc": shown_by_proc(server.process.pid),
            "a model": "\n".join(seen),
            "answers": "\n".join(answers),
            "metrics": server.metrics_page(),
            "status": status.stdout + status.stderr,
            "log": server.log(),
            "start": server.printed(),
        }
        assert {place: names for place, text in shown.items() if (names := hidden.found_in(text))} == {}
        assert "has a secret on the command line" not in server.log()
        server.kill("gateway")  # the next one gets its secrets too
        wait_until(lambda: "gateway" in server.pids() and server.is_ready("prying"))
        assert asked(server, urllib.request.Request(f"{base}/v2/logging")).startswith("403")
        assert hidden.found_in(shown_by_proc(server.process.pid)) == []
    finally:
        assert server.stop() == 0
    readable = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    assert {path: names for path in readable if (names := hidden.found_in(path.read_text(errors="replace")))} == {}


@pytest.mark.timeout(90)
def test_a_secret_on_the_command_line_works_is_hidden_and_warned_of(tmp_path: Path) -> None:
    hidden = Secrets(tmp_path / "secrets")
    write_python_model(tmp_path / "models", "prying", "prying", {"IN": ("INT32", [1])}, {"OUT": ("STRING", [1])}, 1)
    key = hidden.make("http")
    given = (f"--http-restricted-api=logging:admin-key={key}", "--http-restricted-api", "statistics:admin-key=@of-two")
    # nats-server must not inherit it.
    variables = {"WEIR_API_KEY": hidden.make("API key"), "OTEL_EXPORTER_OTLP_HEADERS": hidden.make("headers of traces")}
    with Server(tmp_path, tmp_path / "models", *given, before=("env",), environment=variables) as server:
        base = f"http://127.0.0.1:{server.port}"
        for path, headers, status in (
            ("/v2/logging", {}, "403"),
            ("/v2/logging", {"admin-key": key}, "200"),
            ("/v2/models/stats", {"admin-key": "@of-two"}, "200"),
        ):
            assert asked(server, urllib.request.Request(f"{base}{path}", None, headers))[:3] == status
        assert hidden.found_in(shown_by_proc(server.process.pid) + server.log() + server.printed()) == []
        assert "@of-two" not in shown_by_proc(server.process.pid)
        warnings = [line for line in server.log().splitlines() if "has a secret on the command line" in line]
        assert len(warnings) == 1
        assert "--http-restricted-api=@FILE" in warnings[0]


@pytest.mark.timeout(90)
def test_a_server_of_a_program_gets_its_secrets_past_the_command_line(tmp_path: Path) -> None:
    hidden = Secrets(tmp_path / "secrets")
    write_python_model(tmp_path / "models", "prying", "prying", {"IN": ("INT32", [1])}, {"OUT": ("STRING", [1])}, 1)
    line = f"logging:admin-key={hidden.make('http')}"
    for given in (line, hidden.file("http", line)):
        with weir.Server(tmp_path / "models", http_restricted_api=given) as server:
            request = urllib.request.Request(f"{server.http_url}/v2/logging")
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(request, timeout=30)
            assert hidden.found_in(shown_by_proc(server.pid)) == []

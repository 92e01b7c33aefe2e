"""The gRPC options of a gateway, and their effect as seen by clients."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc

from tests.support.servers.weir_server import clean_environment
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.runtime.child_processes import dies_with_parent
from weir.runtime.readiness import READY_FD

_RUN = """
import json, sys
from weir.gateway.main import run
from weir.gateway.settings import GatewaySettings
sys.exit(run(GatewaySettings(**json.loads(sys.argv[1]))))
"""


@pytest.fixture(scope="module")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    nats = EmbeddedNats(tmp_path_factory.mktemp("nats"))
    nats.start()
    yield nats.url
    nats.stop()


Gateway = Callable[..., Any]


@pytest.fixture
def gateway(nats_url: str, tmp_path: Path) -> Gateway:
    """Runs a gateway with these settings; what it announces. It ends with the context, with this status."""

    @contextmanager
    def running(status: int = 0, **settings: Any) -> Iterator[dict[str, Any]]:
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
        ready, announced = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-c", _RUN, json.dumps({"nats_url": nats_url, **ports, **settings})],
            stderr=subprocess.DEVNULL,
            env={**clean_environment(tmp_path), READY_FD: str(announced)},
            pass_fds=(announced,),
            preexec_fn=dies_with_parent(),
        )
        try:
            os.close(announced)
            with os.fdopen(ready) as pipe:
                yield json.loads(pipe.readline() or "{}")
            if status == 0:
                process.send_signal(signal.SIGTERM)
            assert process.wait(20) == status
        finally:
            process.kill()
            process.wait()

    return running


def test_without_grpc_nobody_listens(gateway: Gateway) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with gateway(allow_grpc=False, grpc_port=port) as announced:
            assert announced["ready"]
            assert "grpc_port" not in announced


def test_with_tls_clients_need_the_certificate(gateway: Gateway, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:P-256",
                "-nodes",
                "-days",
                "2",
            ),
            *("-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost"),
        ],
        check=True,
        capture_output=True,
    )
    files = {"grpc_server_cert": str(certificate), "grpc_server_key": str(key)}
    with gateway(grpc_use_ssl=True, **files) as announced:
        place = f"localhost:{announced['grpc_port']}"
        with tritonclient.grpc.InferenceServerClient(place, ssl=True, root_certificates=str(certificate)) as client:
            assert client.is_server_live()


@pytest.mark.parametrize(
    "settings,expected",
    [
        ({"grpc_use_ssl": True}, "gRPC with TLS needs --grpc-server-cert"),
        (
            {"grpc_infer_response_compression_level": "best"},
            "invalid argument for --grpc-infer-response-compression-level, one of none, low, medium, high",
        ),
    ],
)
def test_settings_that_cannot_be_are_told(gateway: Gateway, settings: dict[str, Any], expected: str) -> None:
    with gateway(status=1, **settings) as announced:
        assert announced == {"error": expected}

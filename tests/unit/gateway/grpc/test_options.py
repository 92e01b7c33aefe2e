"""TLS: encrypted connections, client certificates, and errors for malformed files."""

import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2_grpc

from tests.support.gateway.grpc_frontend import GrpcFrontend, Loop, raw_request, tensor
from tests.support.waiting import wait_until
from weir.access.gate import CertificateNames
from weir.gateway.grpc.options import GrpcOptions
from weir.gateway.settings import GatewaySettings
from weir.http_server.tls import TlsFiles


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority `ca`, and a `server` and a `client` that it has signed."""
    folder = tmp_path_factory.mktemp("certificates")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(folder, "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=authority")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl(folder, "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    (folder / "garbage.pem").write_text("no certificate")
    return folder


def options(folder: Path, **changes: Any) -> GrpcOptions:
    names = {"server_cert": "server.pem", "server_key": "server.key", "root_cert": "ca.pem"}
    chosen = {"use_ssl": True, **{option: str(folder / name) for option, name in names.items()}, **changes}
    return GrpcOptions(**chosen)


@pytest.fixture(scope="module")
def encrypted(grpc_loop: Loop, certificates: Path) -> Iterator[GrpcFrontend]:
    opened = GrpcFrontend(grpc_loop, options(certificates))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def mutual(grpc_loop: Loop, certificates: Path) -> Iterator[GrpcFrontend]:
    opened = GrpcFrontend(grpc_loop, options(certificates, use_ssl_mutual=True))
    yield opened
    opened.close()


def client(frontend: GrpcFrontend, folder: Path, shows_itself: bool = False) -> triton.InferenceServerClient:
    own = {"private_key": str(folder / "client.key"), "certificate_chain": str(folder / "client.pem")}
    return triton.InferenceServerClient(
        f"localhost:{frontend.port}",
        ssl=True,
        root_certificates=str(folder / "ca.pem"),
        **(own if shows_itself else {}),
    )


@pytest.mark.parametrize("size", [2, 2_000_000])
def test_a_stock_client_asks_over_tls(encrypted: GrpcFrontend, certificates: Path, size: int) -> None:
    array = np.arange(size, dtype=np.float32).reshape(1, -1)
    with client(encrypted, certificates) as asking:
        assert asking.is_server_ready()
        result = asking.infer("same_FP32", [tensor("IN", array, "FP32")])
    np.testing.assert_array_equal(result.as_numpy("OUT"), array)


def test_streams_pass_over_tls(encrypted: GrpcFrontend, certificates: Path) -> None:
    trusted = grpc.ssl_channel_credentials((certificates / "ca.pem").read_bytes())
    with grpc.secure_channel(f"localhost:{encrypted.port}", trusted) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        requests = [raw_request("same_FP32", id=str(i)) for i in range(100)]
        ids = [message.infer_response.id for message in stub.ModelStreamInfer(iter(requests), timeout=10)]
    assert ids == [str(i) for i in range(100)]


def test_a_cancelled_call_over_tls_cancels_its_request(encrypted: GrpcFrontend, certificates: Path) -> None:
    trusted = grpc.ssl_channel_credentials((certificates / "ca.pem").read_bytes())
    with grpc.secure_channel(f"localhost:{encrypted.port}", trusted) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer.future(raw_request("silent", id="gone"))
        wait_until(lambda: encrypted.inference.held)
        call.cancel()
        wait_until(lambda: encrypted.inference.cancelled)


def test_http2_is_agreed_on(encrypted: GrpcFrontend, certificates: Path) -> None:
    context = ssl.create_default_context(cafile=certificates / "ca.pem")
    context.set_alpn_protocols(["http/1.1", "h2"])
    with (
        socket.create_connection(("127.0.0.1", encrypted.port), 10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as wire,
    ):
        assert wire.selected_alpn_protocol() == "h2"
        assert wire.version() in ("TLSv1.2", "TLSv1.3")


def test_a_connection_counts_before_its_handshake(encrypted: GrpcFrontend) -> None:
    cap = encrypted.context.connection_cap
    wait_until(lambda: cap.open == 0)  # those of earlier tests have ended
    with socket.create_connection(("127.0.0.1", encrypted.port), 10):
        wait_until(lambda: cap.open == 1)
    wait_until(lambda: cap.open == 0)


def test_a_client_without_tls_gets_nowhere(encrypted: GrpcFrontend, certificates: Path) -> None:
    with triton.InferenceServerClient(f"localhost:{encrypted.port}") as plain:
        assert not _is_live(plain)
    with client(encrypted, certificates) as asking:
        assert asking.is_server_live()


def test_mutual_tls_wants_a_certificate_of_the_client(mutual: GrpcFrontend, certificates: Path) -> None:
    with client(mutual, certificates, shows_itself=True) as known:
        assert known.is_server_live()
    with client(mutual, certificates) as unknown:
        assert not _is_live(unknown)


def test_a_connection_has_the_names_in_the_certificate_of_its_client(
    mutual: GrpcFrontend, encrypted: GrpcFrontend, certificates: Path
) -> None:
    with client(mutual, certificates, shows_itself=True) as known:
        assert known.is_server_live()
        shown = [connection.certificate for connection in mutual.server.connections]
        assert CertificateNames("CN=client", ("DNS:localhost", "IP Address:127.0.0.1")) in shown
    with client(encrypted, certificates) as unknown:
        assert unknown.is_server_live()
        assert {connection.certificate for connection in encrypted.server.connections} == {None}


def test_without_options_of_its_own_it_has_those_of_all_ports(certificates: Path) -> None:
    common = {"tls_cert": str(certificates / "server.pem"), "tls_key": str(certificates / "server.key")}
    shared = GrpcOptions.of(GatewaySettings(nats_url="", **common)).tls_files()
    assert shared == TlsFiles(common["tls_cert"], common["tls_key"], protocols=("h2",))
    own = {"grpc_use_ssl": True, "grpc_server_cert": "own.pem", "grpc_server_key": "own.key"}
    chosen = GrpcOptions.of(GatewaySettings(nats_url="", **common, **own)).tls_files()
    assert chosen is not None
    assert (chosen.cert, chosen.key, chosen.protocols) == ("own.pem", "own.key", ("h2",))
    assert GrpcOptions.of(GatewaySettings(nats_url="")).tls_files() is None


def _is_live(asking: triton.InferenceServerClient) -> bool:
    try:
        return bool(asking.is_server_live(client_timeout=5))
    except triton.InferenceServerException as error:
        assert error.status() in ("StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED")  # noqa: PT017
        return False


@pytest.mark.parametrize(
    "changes,expected",
    [
        ({"server_cert": ""}, "gRPC with TLS needs --grpc-server-cert"),
        ({"server_key": "/no/such/file"}, "gRPC can't read the file of --grpc-server-key, /no/such/file: No such file"),
        ({"root_cert": "", "use_ssl_mutual": True}, "gRPC with TLS needs --grpc-root-cert"),
        ({"root_cert": "garbage.pem", "use_ssl_mutual": True}, "gRPC can't use the certificates of --grpc-root-cert: "),
        ({"server_cert": "garbage.pem"}, "gRPC can't use the certificate of --grpc-server-cert with the key of "),
        ({"server_key": "client.key"}, "gRPC can't use the certificate of --grpc-server-cert with the key of "),
    ],
)
def test_a_failed_start_has_a_reason(certificates: Path, changes: dict[str, Any], expected: str) -> None:
    if not any(str(value).startswith("/") for value in changes.values()):
        changes = {
            option: str(certificates / value) if isinstance(value, str) and value else value
            for option, value in changes.items()
        }
    with pytest.raises(OSError) as caught:
        options(certificates, **changes).tls_context()
    assert str(caught.value).startswith(expected)


def test_mutual_tls_alone_is_tls_too(certificates: Path) -> None:
    assert options(certificates, use_ssl=False).tls_context() is None
    context = options(certificates, use_ssl=False, use_ssl_mutual=True).tls_context()
    assert context is not None
    assert context.verify_mode is ssl.CERT_REQUIRED

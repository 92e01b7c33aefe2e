"""TLS on every port of a server with two gateways: stock clients, versions, client certificates, and changed files."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from geventhttpclient.response import HTTPConnectionClosed
from tritonclient.utils import InferenceServerException

from tests.support.models.zoo import write_small_zoo
from tests.support.servers.certificates import Authority, KeyPair
from tests.support.servers.forked_commands import run_weir
from tests.support.servers.gateway import OwnGateway, own_gateway
from tests.support.servers.roles import Start
from tests.support.servers.weir_server import Server, clean_environment
from tests.support.waiting import eventually, wait_until

IN_FLIGHT = 200


class TlsServer(Server):
    """A `weir serve` with two gateways and a console, whose certificate is that of `authority`."""

    def __init__(self, folder: Path) -> None:
        write_small_zoo(folder / "models")
        self.authority = Authority(folder)
        self.pair = self.authority.sign("server")
        files = (f"--tls-cert={self.pair.cert}", f"--tls-key={self.pair.key}")
        more = ("--gateways=2", "--console-port=0", "--sagemaker-port=0", "--allow-sagemaker=true", "--log-verbose=1")
        super().__init__(folder, folder / "models", *files, *more)
        self.trusting = ssl.create_default_context(cafile=self.authority.cert)
        self.console_place = self.printed_value("console").removeprefix("https://")
        self.sagemaker_place = self.printed_value("SageMaker").removeprefix("https://")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    with TlsServer(tmp_path_factory.mktemp("tls")) as started:
        yield started


def fetch(place: str, path: str, context: ssl.SSLContext) -> str:
    with urllib.request.urlopen(f"https://{place}{path}", context=context, timeout=20) as page:
        return str(page.read().decode())


def identity(client: Any, module: Any, size: int) -> bool:
    """Whether the model returns what it gets."""
    array = np.arange(size, dtype=np.float32).reshape(1, -1)
    tensor = module.InferInput("IN", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    return np.array_equal(client.infer("identity_FP32", [tensor]).as_numpy("OUT"), array)


def http_client(
    place: str, authority: Authority, own: KeyPair | None = None
) -> tritonclient.http.InferenceServerClient:
    shown = {} if own is None else {"certfile": str(own.cert), "keyfile": str(own.key)}
    options = {"ca_certs": str(authority.cert), **shown}
    return tritonclient.http.InferenceServerClient(place, ssl=True, ssl_options=options, network_timeout=40.0)


def grpc_client(
    place: str, authority: Authority, own: KeyPair | None = None
) -> tritonclient.grpc.InferenceServerClient:
    shown = {} if own is None else {"certificate_chain": str(own.cert), "private_key": str(own.key)}
    return tritonclient.grpc.InferenceServerClient(place, ssl=True, root_certificates=str(authority.cert), **shown)


@pytest.mark.parametrize("size", [4, 20_000, 2_000_000])
def test_stock_clients_send_tensors_of_all_sizes(server: TlsServer, size: int) -> None:
    with http_client(server.http_place, server.authority) as http:
        assert identity(http, tritonclient.http, size)
    with grpc_client(server.grpc_place, server.authority) as calls:
        assert identity(calls, tritonclient.grpc, size)


def test_all_other_ports_are_encrypted_too(server: TlsServer) -> None:
    assert "nv_inference_request_success" in fetch(server.metrics_place, "/metrics", server.trusting)
    assert "<!doctype html>" in fetch(server.console_place, "/", server.trusting)
    assert fetch(server.sagemaker_place, "/ping", server.trusting) == ""
    for place in (server.http_place, server.metrics_place, server.console_place, server.sagemaker_place):
        with pytest.raises(OSError):
            urllib.request.urlopen(f"http://{place}/", timeout=20)
    with grpc.insecure_channel(server.grpc_place) as channel, pytest.raises(grpc.FutureTimeoutError):
        grpc.channel_ready_future(channel).result(timeout=1)


def test_a_port_speaks_tls_1_2_and_1_3_and_its_protocol(server: TlsServer) -> None:
    doors = {server.http_place: "http/1.1", server.grpc_place: "h2", server.console_place: "http/1.1"}
    for place, protocol in doors.items():
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = ssl.create_default_context(cafile=server.authority.cert)
            context.minimum_version = context.maximum_version = version
            context.set_alpn_protocols(["h2", "http/1.1"])
            with handshake(place, context) as wire:
                assert wire.version() == version.name.replace("_", ".")
                assert wire.selected_alpn_protocol() == protocol


def handshake(place: str, context: ssl.SSLContext) -> ssl.SSLSocket:
    host, _, port = place.rpartition(":")
    return context.wrap_socket(socket.create_connection((host, int(port)), 20), server_hostname=host)


def certificate_at(place: str, context: ssl.SSLContext) -> bytes:
    with handshake(place, context) as wire:
        return wire.getpeercert(True) or b""


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_with_the_authority_reads_the_metadata(server: TlsServer) -> None:
    url = f"https://{server.http_place}/v2"
    command = ["curl", "-sS", "--cacert", str(server.authority.cert), url]
    assert json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["name"] == "triton"
    assert subprocess.run(["curl", "-s", url], check=False, capture_output=True).returncode == 60  # not trusted


def weir(server: TlsServer, folder: Path, *words: str, **environment: str) -> tuple[int, str]:
    """The status and the output of a command of the user of this server."""
    home = {"XDG_DATA_HOME": str(server.folder / "tmp" / "share")}
    out = folder / "out"
    with out.open("wb") as file:
        process = run_weir(words, {**clean_environment(folder), **home, **environment}, file.fileno(), file.fileno())
    return process.wait(60), out.read_text()


def test_commands_reach_a_server_that_an_authority_vouches_for(server: TlsServer, tmp_path: Path) -> None:
    url = f"--url=https://{server.http_place}"
    status, text = weir(server, tmp_path, "infer", "identity_FP32", url)
    assert (status, "CERTIFICATE_VERIFY_FAILED" in text) == (1, True), text
    trusted = {"SSL_CERT_FILE": str(server.authority.cert)}
    status, text = weir(server, tmp_path, "infer", "identity_FP32", url, **trusted)
    assert (status, "response of identity_FP32" in text) == (0, True), text
    short = ("--measure=0.2", "--warmup=0.1", "--max-windows=1", "--concurrency=2")
    for protocol, place in (("http", f"https://{server.http_place}"), ("grpc", f"grpcs://{server.grpc_place}")):
        words = ("perf", "identity_FP32", f"--protocol={protocol}", f"--url={place}", "--shape=IN:4", *short)
        status, text = weir(server, tmp_path, *words, **trusted)
        assert status == 0, text


def test_the_cluster_shows_encrypted_urls(server: TlsServer, tmp_path: Path) -> None:
    status, text = weir(server, tmp_path, "status", f"--nats={server.nats_url}")
    assert status == 0, text
    assert f"https://{server.http_place}" in text
    assert f"grpcs://{server.grpc_place}" in text
    assert "http://" not in text


def test_a_new_certificate_costs_no_connection_and_no_request(server: TlsServer) -> None:
    body = json.dumps(
        {
            "inputs": [
                {"name": "VALUE", "shape": [1, 1], "datatype": "INT64", "data": [7]},
                {"name": "DELAY_MS", "shape": [1, 1], "datatype": "FP32", "data": [40.0]},
            ]
        }
    ).encode()
    request = b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    host, _, port = server.http_place.rpartition(":")
    places = (server.http_place, server.grpc_place, server.metrics_place, server.console_place)

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        return int(head.split()[1])

    async def scenario() -> list[int]:
        kept = [await asyncio.open_connection(host, int(port), ssl=server.trusting) for _ in range(IN_FLIGHT)]
        asked = [asyncio.create_task(ask(*one)) for one in kept]
        await eventually(lambda: sum(task.done() for task in asked) > 0)
        server.authority.sign("server")
        new = ssl.PEM_cert_to_DER_cert(server.pair.cert.read_text())
        for place in places:
            for _ in range(4):  # both gateways
                while await asyncio.to_thread(certificate_at, place, server.trusting) != new:
                    await asyncio.sleep(0.05)
        statuses = await asyncio.gather(*asked)
        statuses += await asyncio.gather(*(ask(*one) for one in kept))  # on the same connections
        for _, writer in kept:
            writer.close()
        return statuses

    with grpc_client(server.grpc_place, server.authority) as calls:
        assert identity(calls, tritonclient.grpc, 4)
        assert asyncio.run(scenario()) == [200] * (2 * IN_FLIGHT)
        assert identity(calls, tritonclient.grpc, 4)
    with http_client(server.http_place, server.authority) as http:
        assert identity(http, tritonclient.http, 4)


def test_half_a_pair_keeps_the_former_one(server: TlsServer) -> None:
    former = certificate_at(server.http_place, server.trusting)
    said = server.log().count("the changed TLS files are not used")
    new = server.authority.sign("renewed")
    server.pair.cert.write_bytes(new.cert.read_bytes())
    # Each of the two gateways follows the files for HTTP and for gRPC, and the console does.
    wait_until(lambda: server.log().count("the changed TLS files are not used") >= said + 5)
    assert certificate_at(server.http_place, server.trusting) == former
    server.pair.key.write_bytes(new.key.read_bytes())
    wait_until(lambda: certificate_at(server.http_place, server.trusting) != former)


def test_clients_that_never_shake_hands_cost_others_nothing(server: TlsServer) -> None:
    host, _, port = server.http_place.rpartition(":")
    silent = [socket.create_connection((host, int(port)), 20) for _ in range(300)]
    try:
        with http_client(server.http_place, server.authority) as http:
            for _ in range(10):
                assert identity(http, tritonclient.http, 4)
    finally:
        for one in silent:
            one.close()


# Client certificates, and gateways and consoles on their own


def mutual(folder: Path, server: TlsServer, **more: Any) -> Any:
    files = {"tls_cert": str(server.pair.cert), "tls_key": str(server.pair.key)}
    return own_gateway(folder, server, **files, tls_client_ca=str(server.authority.cert), **more)


def is_live(client: Any) -> bool:
    with closing(client):
        try:
            return bool(client.is_server_live())
        except (InferenceServerException, HTTPConnectionClosed, OSError):
            return False


def doors(gateway: OwnGateway, authority: Authority, own: KeyPair | None) -> list[bool]:
    """Whether HTTP, gRPC and metrics let a client in that has this certificate."""
    context = ssl.create_default_context(cafile=authority.cert)
    if own is not None:
        context.load_cert_chain(*own)
    try:
        metrics = "nv_" in fetch(gateway.metrics_place, "/metrics", context)
    except OSError:
        metrics = False
    http, calls = http_client(gateway.http_place, authority, own), grpc_client(gateway.grpc_place, authority, own)
    return [is_live(http), is_live(calls), metrics]


def test_a_client_without_the_certificate_gets_nowhere(server: TlsServer, tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    foreign = Authority(tmp_path / "foreign", "foreign").sign("client")
    own = server.authority.sign("client")
    with mutual(tmp_path, server) as gateway:
        assert doors(gateway, server.authority, None) == [False] * 3
        assert doors(gateway, server.authority, foreign) == [False] * 3
        assert doors(gateway, server.authority, own) == [True] * 3
        trusted = {"SSL_CERT_FILE": str(server.authority.cert)}
        shown = {"WEIR_CLIENT_CERT": str(own.cert), "WEIR_CLIENT_KEY": str(own.key)}
        words = ("infer", "identity_FP32", f"--url=https://{gateway.http_place}")
        assert weir(server, tmp_path, *words, **trusted)[0] == 1
        status, text = weir(server, tmp_path, *words, **trusted, **shown)
        assert status == 0, text


def test_a_certificate_that_is_only_requested_may_be_missing(server: TlsServer, tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    foreign = Authority(tmp_path / "foreign", "foreign").sign("client")
    with mutual(tmp_path, server, tls_client_auth="request") as gateway:
        assert doors(gateway, server.authority, None) == [True] * 3
        assert doors(gateway, server.authority, server.authority.sign("client")) == [True] * 3
        assert doors(gateway, server.authority, foreign) == [False] * 3


def test_grpc_may_have_a_certificate_of_its_own(server: TlsServer, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other", "other")
    pair = other.sign("server")
    own = {"grpc_use_ssl": True, "grpc_server_cert": str(pair.cert), "grpc_server_key": str(pair.key)}
    with mutual(tmp_path, server, **own) as gateway:
        assert is_live(grpc_client(gateway.grpc_place, other))
        assert not is_live(grpc_client(gateway.grpc_place, server.authority))
        assert is_live(http_client(gateway.http_place, server.authority, server.authority.sign("client")))


def test_a_gateway_without_its_files_does_not_start(server: TlsServer, tmp_path: Path) -> None:
    with own_gateway(tmp_path, server, tls_cert="/no/such/file", tls_key=str(server.pair.key)) as gateway:
        assert gateway.told == {
            "error": "Weir can't read the file of --tls-cert, /no/such/file: No such file or directory"
        }


def test_a_console_of_its_own_is_encrypted(start: Start) -> None:
    authority = Authority(start.folder)
    pair = authority.sign("server")
    console = start("console", "--console-port=0", f"--tls-cert={pair.cert}", f"--tls-key={pair.key}")
    context = ssl.create_default_context(cafile=authority.cert)
    place = f"127.0.0.1:{console.facts['console_port']}"
    assert "<!doctype html>" in fetch(place, "/", context)
    former = certificate_at(place, context)
    authority.sign("server")
    wait_until(lambda: certificate_at(place, context) != former)


def test_a_server_signs_its_own_certificate(tmp_path: Path) -> None:
    write_small_zoo(tmp_path / "models")
    data = tmp_path / "data"
    with Server(tmp_path, tmp_path / "models", "--tls-self-signed", f"--data-dir={data}") as server:
        cert = data / "tls" / "cert.pem"
        context = ssl.create_default_context(cafile=cert)
        assert '"triton"' in fetch(server.http_place, "/v2", context)
        assert '"triton"' in fetch(f"localhost:{server.port}", "/v2", context)
        with tritonclient.grpc.InferenceServerClient(server.grpc_place, ssl=True, root_certificates=str(cert)) as calls:
            assert identity(calls, tritonclient.grpc, 4)
        assert f"curl --cacert {cert} https://localhost:{server.port}/v2" in server.printed()

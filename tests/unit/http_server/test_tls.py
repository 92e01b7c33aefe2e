"""TLS: contexts from files, errors that name the option, changed files, and HTTP connections that are encrypted."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
import time
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.servers.certificates import Authority, KeyPair, private_pem
from tests.support.waiting import eventually
from weir.http_server import client_connection
from weir.http_server.asgi import CERTIFICATE_KEY
from weir.http_server.client_connection import ConnectionLimits
from weir.http_server.connection import HttpConnection
from weir.http_server.connection_cap import ConnectionCap
from weir.http_server.listeners import HttpListeners
from weir.http_server.stall_detection import STALL_PERIOD_S
from weir.http_server.tls import ServerTls, TlsFiles, TlsOptions
from weir.runtime.certificates import fingerprint
from weir.runtime.memory_ledger import MemoryLedger


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def server(authority: Authority) -> KeyPair:
    return authority.sign("server")


def files(pair: KeyPair, client_ca: Path | None = None, client_auth: str = "require") -> TlsFiles:
    return TlsFiles(str(pair.cert), str(pair.key), str(client_ca) if client_ca else None, client_auth)


# Contexts


@pytest.mark.parametrize(
    "changes,expected",
    [
        ({"tls_cert": ""}, "Weir with TLS needs --tls-cert"),
        ({"tls_key": ""}, "Weir with TLS needs --tls-key"),
        ({"tls_cert": "", "tls_key": ""}, "Weir with TLS needs --tls-cert"),
        ({"tls_key": "/no/such/file"}, "Weir can't read the file of --tls-key, /no/such/file: No such file"),
        ({"tls_cert": "garbage"}, "Weir can't use the certificate of --tls-cert with the key of --tls-key: "),
        ({"tls_key": "other"}, "Weir can't use the certificate of --tls-cert with the key of --tls-key: KEY_VALUES"),
        ({"tls_key": "hidden"}, "Weir can't use the certificate of --tls-cert with the key of --tls-key: "),
        ({"tls_client_ca": "garbage"}, "Weir can't use the certificates of --tls-client-ca: "),
        (
            {"tls_client_ca": "/no/such/file"},
            "Weir can't read the file of --tls-client-ca, /no/such/file: No such file",
        ),
    ],
)
def test_an_error_names_the_option(
    authority: Authority, server: KeyPair, tmp_path: Path, changes: dict[str, str], expected: str
) -> None:
    (tmp_path / "garbage").write_text("no certificate")
    (tmp_path / "other").write_bytes(authority.sign("another").key.read_bytes())
    (tmp_path / "hidden").write_bytes(private_pem(ec.generate_private_key(ec.SECP256R1()), b"a password"))
    chosen = {"tls_cert": str(server.cert), "tls_key": str(server.key), "tls_client_ca": str(authority.cert)}
    made = {name: str(tmp_path / value) if value and "/" not in value else value for name, value in changes.items()}
    found = TlsOptions(**{**chosen, **made}).tls_files()
    assert found is not None
    with pytest.raises(OSError) as caught:
        found.context()
    assert str(caught.value).startswith(expected)


def test_without_files_there_is_no_tls() -> None:
    assert TlsOptions().tls_files() is None


def test_clients_are_asked_for_what_the_options_say(authority: Authority, server: KeyPair) -> None:
    assert files(server).context().verify_mode is ssl.CERT_NONE
    assert files(server, authority.cert).context().verify_mode is ssl.CERT_REQUIRED
    assert files(server, authority.cert, "request").context().verify_mode is ssl.CERT_OPTIONAL


def test_the_fingerprint_is_that_of_the_first_certificate(authority: Authority, server: KeyPair) -> None:
    chain = server.cert.read_text() + authority.cert.read_text()
    expected = x509.load_pem_x509_certificate(server.cert.read_bytes()).fingerprint(hashes.SHA256()).hex().upper()
    assert fingerprint(chain).replace(":", "") == expected
    with pytest.raises(ValueError, match="not a certificate"):
        fingerprint("nothing")


# Changed files


def test_a_changed_pair_is_used(authority: Authority, server: KeyPair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tls = ServerTls(files(server))
    first = tls.context
    tls.check_files()
    assert tls.context is first
    authority.sign("server")
    tls.check_files()
    assert tls.context is not first
    assert [fingerprint(server.cert.read_text()) in record.getMessage() for record in caplog.records] == [True]


def test_half_a_pair_keeps_the_former_one_and_is_told_once(
    authority: Authority, server: KeyPair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tls = ServerTls(files(server))
    first, key = tls.context, server.key.read_bytes()
    authority.sign("server")
    new_key = server.key.read_bytes()
    server.key.write_bytes(key)
    for _ in range(3):
        tls.check_files()
    assert tls.context is first
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    server.key.write_bytes(new_key)
    tls.check_files()
    assert tls.context is not first
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


@pytest.mark.parametrize("broken", [b"", b"-----BEGIN CERTIFICATE-----\nMII", None])
def test_a_file_that_is_broken_or_away_keeps_the_former_one(
    server: KeyPair, broken: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    tls, content = ServerTls(files(server)), server.cert.read_bytes()
    first = tls.context
    if broken is None:
        server.cert.unlink()
    else:
        server.cert.write_bytes(broken)
    tls.check_files()
    assert tls.context is first
    assert len(caplog.records) == 1
    server.cert.write_bytes(content)
    tls.check_files()
    assert tls.context is not first


def test_a_link_that_leads_elsewhere_is_a_change(authority: Authority, server: KeyPair, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(server.cert)
    (tmp_path / "copy").write_bytes(server.cert.read_bytes())
    tls = ServerTls(files(KeyPair(link, server.key)))
    first = tls.context
    (tmp_path / "next").symlink_to(tmp_path / "copy")
    (tmp_path / "next").rename(link)
    tls.check_files()
    assert tls.context is not first


# Connections


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Responds with the scheme, the names in the client's certificate, and the size of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    shown = scope[CERTIFICATE_KEY]
    text = f"{scope['scheme']} {shown and (shown.subject, *shown.alternatives)} {size}".encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
    await send({"type": "http.response.body", "body": text})


@asynccontextmanager
async def serving(tls: ServerTls | None, limit: int = 100) -> AsyncIterator[tuple[HttpListeners, ConnectionCap]]:
    listeners, cap = HttpListeners(), ConnectionCap(limit)
    limits = ConnectionLimits(ledger=MemoryLedger(), arriving_slots=MemoryLedger(), cap=cap, max_body_bytes=1 << 26)
    listeners.bind("HTTP", "127.0.0.1", 0)
    listeners.encrypt(tls, cap)
    await listeners.serve("HTTP", functools.partial(HttpConnection, application, limits))
    try:
        yield listeners, cap
    finally:
        listeners.stop("HTTP", at_once=True)
        await listeners.wait_closed()


def trusting(authority: Authority, own: KeyPair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.cert)
    if own is not None:
        context.load_cert_chain(*own)
    return context


async def ask(port: int, context: ssl.SSLContext | None, body_bytes: int = 0) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        return await ask_again(reader, writer, body_bytes)
    finally:
        writer.close()


async def ask_again(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body_bytes: int = 0) -> str:
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % body_bytes + bytes(body_bytes))
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return (await reader.readexactly(size)).decode()


async def test_the_application_learns_the_scheme_and_the_certificate(authority: Authority, server: KeyPair) -> None:
    known = authority.sign("client", uris=["spiffe://x/y"])
    async with serving(ServerTls(files(server, authority.cert, "request"))) as (listeners, cap):
        port = listeners.port("HTTP")
        assert await ask(port, trusting(authority)) == "https None 0"
        shown = "('CN=client', 'DNS:localhost', 'IP Address:127.0.0.1', 'URI:spiffe://x/y')"
        assert await ask(port, trusting(authority, known)) == f"https {shown} 0"
        assert cap.open <= 2  # handshakes do not count beside their connections
    async with serving(None) as (listeners, _):
        assert await ask(listeners.port("HTTP"), None) == "http None 0"


async def test_a_required_certificate_must_be_of_the_authority(
    authority: Authority, server: KeyPair, tmp_path: Path
) -> None:
    (tmp_path / "foreign").mkdir()
    foreign = Authority(tmp_path / "foreign", "foreign").sign("client")
    async with serving(ServerTls(files(server, authority.cert))) as (listeners, _):
        for own in (None, foreign):
            with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
                await ask(listeners.port("HTTP"), trusting(authority, own))
        assert "CN=client" in await ask(listeners.port("HTTP"), trusting(authority, authority.sign("client")))


@pytest.mark.parametrize("size", [1 << 10, 1 << 16, 5 << 20])
async def test_bodies_of_all_sizes_arrive(authority: Authority, server: KeyPair, size: int) -> None:
    async with serving(ServerTls(files(server))) as (listeners, _):
        assert await ask(listeners.port("HTTP"), trusting(authority), size) == f"https None {size}"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_both_versions_are_spoken_and_http_1_1_is_agreed_on(
    authority: Authority, server: KeyPair, version: ssl.TLSVersion
) -> None:
    context = trusting(authority)
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2", "http/1.1"])
    async with serving(ServerTls(files(server))) as (listeners, _):
        _, writer = await asyncio.open_connection("127.0.0.1", listeners.port("HTTP"), ssl=context)
        agreed = writer.get_extra_info("ssl_object")
        assert agreed.version() == version.name.replace("_", ".")
        assert agreed.selected_alpn_protocol() == "http/1.1"
        writer.close()


def test_the_version_before_them_is_refused(authority: Authority, server: KeyPair) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.load_verify_locations(authority.cert)
    old.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):  # it has sent its hello
        old.wrap_bio(to_client, to_server, server_hostname="localhost").do_handshake()
    with pytest.raises(ssl.SSLError, match="UNSUPPORTED_PROTOCOL"):
        files(server).context().wrap_bio(to_server, to_client, server_side=True).do_handshake()


async def test_a_kept_connection_goes_on_while_new_ones_get_the_new_certificate(
    authority: Authority, server: KeyPair
) -> None:
    tls = ServerTls(files(server))

    def certificate(writer: asyncio.StreamWriter) -> bytes:
        return bytes(writer.get_extra_info("ssl_object").getpeercert(True))

    async with serving(tls) as (listeners, _):
        port = listeners.port("HTTP")
        kept = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(authority))
        former = certificate(kept[1])
        authority.sign("server")
        tls.check_files()
        assert await ask_again(*kept) == "https None 0"
        new = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(authority))
        assert certificate(new[1]) == ssl.PEM_cert_to_DER_cert(server.cert.read_text()) != former
        assert await ask_again(*new) == await ask_again(*kept) == "https None 0"
        for one in (kept, new):
            one[1].close()


async def test_clients_that_never_shake_hands_cost_others_nothing(authority: Authority, server: KeyPair) -> None:
    async with serving(ServerTls(files(server))) as (listeners, cap):
        port = listeners.port("HTTP")
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(90)]
        for _ in range(20):
            assert await ask(port, trusting(authority)) == "https None 0"
        assert cap.open <= cap.share
        for _, writer in silent:
            writer.close()


def never_reads(port: int, authority: Authority, sent: bytes = b"") -> ssl.SSLSocket:
    """A client that shakes hands, sends this, and reads nothing: it does not agree to the end of the connection either."""
    wire = socket.create_connection(("127.0.0.1", port), 20)
    connected = trusting(authority).wrap_socket(wire, server_hostname="localhost")
    connected.sendall(sent)
    return connected


async def test_a_connection_that_gives_room_is_gone_whatever_its_client_does(
    authority: Authority, server: KeyPair
) -> None:
    async with serving(ServerTls(files(server)), limit=4) as (listeners, cap):
        port = listeners.port("HTTP")
        silent = []
        for number in range(12):
            silent.append(await asyncio.to_thread(never_reads, port, authority))
            await eventually(lambda: len(listeners.connections("HTTP")) == min(number + 1, cap.share))  # noqa: B023
        for one in silent:
            one.close()


async def test_a_client_that_does_not_agree_to_the_end_is_left_in_time(authority: Authority, server: KeyPair) -> None:
    request = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    async with serving(ServerTls(files(server))) as (listeners, _):
        client = await asyncio.to_thread(never_reads, listeners.port("HTTP"), authority, request)
        (connection,) = await eventually(lambda: listeners.connections("HTTP"))
        await eventually(connection.transport.is_closing)
        now_s = time.monotonic()
        connection.check_progress(now_s)
        connection.check_progress(now_s + STALL_PERIOD_S - 1)
        await asyncio.sleep(0)
        assert listeners.connections("HTTP")
        connection.check_progress(now_s + STALL_PERIOD_S)
        await eventually(lambda: not listeners.connections("HTTP"))
        client.close()


async def test_an_idle_client_that_does_not_agree_to_the_end_holds_up_no_stop(
    authority: Authority, server: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_connection, "CLOSE_NOTIFY_S", 0.01)
    async with serving(ServerTls(files(server))) as (listeners, _):
        client = await asyncio.to_thread(never_reads, listeners.port("HTTP"), authority)
        await eventually(lambda: listeners.connections("HTTP"))
        listeners.stop("HTTP")
        await eventually(lambda: not listeners.connections("HTTP"))
        client.close()


async def test_a_server_that_stops_takes_no_more_connections(authority: Authority, server: KeyPair) -> None:
    async with serving(ServerTls(files(server))) as (listeners, _):
        port = listeners.port("HTTP")
        kept = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(authority))
        assert await ask_again(*kept) == "https None 0"
        listeners.stop("HTTP")
        await asyncio.sleep(0)
        assert (await kept[0].read()) == b""  # an idle connection ends
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)
        kept[1].close()

"""Connections to real nats-servers by URL, TLS, password, nkey and credentials, and the errors for wrong ones."""

import asyncio
import base64
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nkeys
import pytest

from tests.support.servers.nats import GivenNats, make_certificates
from tests.support.servers.roles import started
from weir.bus.message import Message
from weir.bus.nats.access import BrokerAccess, BrokerRefused, BrokerServer, without_secrets
from weir.bus.nats.connection import Bus
from weir.bus.nats.thread_publisher import ThreadPublisher


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("nats://127.0.0.1:4333", BrokerServer("127.0.0.1", 4333)),
        ("host", BrokerServer("host", 4222)),
        ("tls://host", BrokerServer("host", 4222, True)),
        ("nats://u:p%40ss@host:1", BrokerServer("host", 1, False, "u", "p@ss")),
        ("nats://token@host", BrokerServer("host", 4222, False, "token")),
        ("tls://[::1]:4222", BrokerServer("::1", 4222, True)),
    ],
)
def test_urls(url: str, server: BrokerServer) -> None:
    assert BrokerServer.of(url) == server


@pytest.mark.parametrize("url", ["http://host", "ws://host:1", "nats://host:port", "nats://host:99999"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        BrokerServer.of(url)


def test_secrets_are_not_told() -> None:
    assert without_secrets("nats://u:secret@a:1,tls://secret@b") == "a:1,b"
    assert "secret" not in repr(BrokerAccess.of({}, {"WEIR_NATS_USER": "u", "WEIR_NATS_PASSWORD": "secret"}))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def tls(folder: Path, name: str = "server", **options: Any) -> dict[str, Any]:
    return {"tls": {"cert_file": str(folder / f"{name}.pem"), "key_file": str(folder / f"{name}.key"), **options}}


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[GivenNats]:
    """One that asks for a certificate and a password."""
    mutual = tls(certificates, ca_file=str(certificates / "ca.pem"), verify=True)
    users = {"users": [{"user": "weir", "password": "secret"}]}
    server = GivenNats(tmp_path_factory.mktemp("nats"), monitor=False, authorization=users, **mutual)
    yield server
    server.stop()


def access_of(folder: Path, **changes: str) -> BrokerAccess:
    fields = {"ca": str(folder / "ca.pem"), "cert": str(folder / "client.pem"), "key": str(folder / "client.key")}
    return BrokerAccess(**{**fields, "user": "weir", "password": "secret", **changes})  # type: ignore[arg-type]


async def exchange(url: str, access: BrokerAccess) -> list[int]:
    """Sends messages through all three clients; returns the sizes of what came."""
    received: list[Message] = []
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(url, "test", background, access=access)
        await bus.subscribe("sizes", received.append)
        await bus.jetstream.account_info()
        publisher = ThreadPublisher(bus)
        await bus.flush()
        bus.publish("sizes", b"z" * 600_000)
        await bus.flush()
        await asyncio.to_thread(publisher.publish, [("sizes", b"z" * size) for size in (0, 1, 600_000)])
        while len(received) < 4:
            await bus.flush()
        await bus.close()
    return [len(message.data) for message in received]


async def test_all_clients_speak_tls(encrypted: GivenNats, certificates: Path) -> None:
    assert encrypted.url.startswith("tls://")
    access = access_of(certificates)
    for url in (
        encrypted.url,
        encrypted.url.replace("tls://", "nats://"),
        encrypted.url.replace("127.0.0.1", "localhost"),
    ):
        assert await exchange(url, access) == [600_000, 0, 1, 600_000]


@pytest.mark.parametrize(
    ("changes", "reply"),
    [
        ({"password": "wrong"}, "Authorization Violation"),
        ({"ca": "other.pem"}, "certificate"),
        ({"ca": ""}, "certificate"),
        ({"ca": "missing.pem"}, "missing.pem: No such file"),
        ({"ca": "client.key"}, "--nats-ca"),
        ({"cert": "", "key": ""}, "certificate required"),
        ({"cert": ""}, "together"),
        ({"cert": "expired.pem", "key": "expired.key"}, "certificate"),
        ({"nkey": "client.key"}, "the seed of an nkey"),
        ({"credentials": "client.key"}, "a JWT and the seed"),
    ],
)
async def test_what_can_not_succeed_is_told_at_once(
    encrypted: GivenNats, certificates: Path, changes: dict[str, str], reply: str
) -> None:
    files = {name: str(certificates / value) if "." in value else value for name, value in changes.items()}
    # A connection that was tried until its time-out would end with another error.
    told_of = await refusal(encrypted.url, access_of(certificates, **files))
    assert re.search(reply, told_of, re.IGNORECASE), told_of
    assert "secret" not in told_of


async def refusal(url: str, access: BrokerAccess) -> str:
    async with asyncio.TaskGroup() as background:
        with pytest.raises(BrokerRefused) as raised:
            await Bus.connect(url, "test", background, access=access)
    return str(raised.value)


async def test_a_server_without_tls_is_not_told_who_we_are(tmp_path: Path, certificates: Path) -> None:
    server = GivenNats(tmp_path, monitor=False)
    try:
        reply = await refusal(server.url.replace("nats://", "tls://weir:secret@"), access_of(certificates))
    finally:
        server.stop()
    assert "no encrypted connection" in reply


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def new_pair(kind: int) -> nkeys.KeyPair:
    return nkeys.from_seed(bytearray(nkeys.encode_seed(os.urandom(32), kind)))


def signed(claims: dict[str, Any], issuer: nkeys.KeyPair) -> str:
    """A JWT of NATS."""
    claims = {"iat": int(time.time()), "iss": issuer.public_key.decode(), "jti": os.urandom(8).hex(), **claims}
    head = encoded(json.dumps({"typ": "JWT", "alg": "ed25519-nkey"}).encode())
    body = f"{head}.{encoded(json.dumps(claims).encode())}"
    return f"{body}.{encoded(issuer.sign(body.encode()))}"


async def test_nkeys_and_credentials(tmp_path: Path) -> None:
    kinds = (nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_USER)
    operator, account, system, user = map(new_pair, kinds)
    pairs = {"o": operator, "a": account, "s": system, "u": user}
    name = {key: pair.public_key.decode() for key, pair in pairs.items()}
    (tmp_path / "seed").write_bytes(bytes(user.seed) + b"\n")
    limits = {"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": True, "conn": -1}
    stored = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
    of_account = {"type": "account", "version": 2}
    jwts = {
        "o": signed({"sub": name["o"], "name": "o", "nats": {"type": "operator", "version": 2}}, operator),
        "a": signed({"sub": name["a"], "name": "a", "nats": {"limits": {**limits, **stored}, **of_account}}, operator),
        "s": signed({"sub": name["s"], "name": "s", "nats": {"limits": limits, **of_account}}, operator),
        "u": signed(
            {
                "sub": name["u"],
                "name": "u",
                "nats": {"subs": -1, "data": -1, "payload": -1, "type": "user", "version": 2},
            },
            account,
        ),
    }
    (tmp_path / "creds").write_text(
        f"-----BEGIN NATS USER JWT-----\n{jwts['u']}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{bytes(user.seed).decode()}\n------END USER NKEY SEED------\n"
    )
    by_key = GivenNats(tmp_path / "a", monitor=False, authorization={"users": [{"nkey": name["u"]}]})
    by_jwt = GivenNats(
        tmp_path / "b",
        monitor=False,
        operator=jwts["o"],
        resolver="MEMORY",
        resolver_preload={name["a"]: jwts["a"], name["s"]: jwts["s"]},
        system_account=name["s"],
    )
    try:
        assert len(await exchange(by_key.url, BrokerAccess(nkey=str(tmp_path / "seed")))) == 4
        assert len(await exchange(by_jwt.url, BrokerAccess(credentials=str(tmp_path / "creds")))) == 4
        assert "Authorization Violation" in await refusal(by_key.url, BrokerAccess())
        assert "Authorization Violation" in await refusal(by_jwt.url, BrokerAccess(user="u", password="p"))
    finally:
        by_key.stop()
        by_jwt.stop()


async def test_a_user_that_is_revoked_is_let_in_again_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = GivenNats(tmp_path, monitor=False, authorization={"users": [{"user": "weir", "password": "secret"}]})
    received: list[Message] = []
    try:
        async with asyncio.TaskGroup() as background:
            bus = await Bus.connect(server.url, "test", background, access=BrokerAccess(user="weir", password="secret"))
            await bus.subscribe("here", received.append)
            server.reload(authorization={"users": [{"user": "weir", "password": "changed"}]})
            async with asyncio.timeout(10):
                while "127.0.0.1" not in caplog.text:
                    await asyncio.sleep(0.02)
            server.reload(authorization={"users": [{"user": "weir", "password": "secret"}]})
            async with asyncio.timeout(10):
                while not bus.is_connected:
                    await asyncio.sleep(0.02)
            bus.publish("here", b"again")
            await bus.flush()
            async with asyncio.timeout(10):
                await asyncio.to_thread(lambda: None)
                await bus.jetstream.account_info()
            await bus.close()
    finally:
        server.stop()
    assert [message.data for message in received] == [b"again"]
    assert "Authorization Violation" in caplog.text
    assert "secret" not in caplog.text


def test_a_role_that_is_refused_ends_with_one_line(tmp_path: Path, encrypted: GivenNats, certificates: Path) -> None:
    files = [f"--nats-ca={certificates / 'ca.pem'}", f"--nats-cert={certificates / 'client.pem'}"]
    url = encrypted.url.replace("tls://", "tls://weir:wrongpassword@")
    words = ["-m", "weir", "scheduler", f"--nats={url}", *files, f"--nats-key={certificates / 'client.key'}"]
    process, facts = started(words, tmp_path, tmp_path / "log")
    assert facts == {"error": "nats-server refused the connection: Authorization Violation"}
    assert process.wait(20) == 1
    log = (tmp_path / "log").read_text()
    assert "Authorization Violation" in log
    assert "Traceback" not in log
    assert "wrongpassword" not in log

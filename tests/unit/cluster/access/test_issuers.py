"""The keys of issuers: from files and from URLs, rotated, and kept while the issuer is away."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from jwt.algorithms import OKPAlgorithm

from weir.access.gate import Gate, Shown
from weir.access.policy.rules import Issuer
from weir.access.tokens.signing_keys import MAX_SET_BYTES
from weir.cluster.access import key_sets
from weir.cluster.access.issuers import Issuers
from weir.cluster.access.key_sets import REFRESH_S, RETRY_S, FetchedKeySet, fetch_key_set
from weir.schemas.core.errors import WeirError

NOW_S = 1_800_000_000
URL = "https://issuer/keys.json"
KEYS = {name: ed25519.Ed25519PrivateKey.generate() for name in ("old", "new")}


def key_set(*names: str) -> bytes:
    rows = [{**OKPAlgorithm.to_jwk(KEYS[name].public_key(), as_dict=True), "kid": name} for name in names]
    return json.dumps({"keys": rows}).encode()


def token(name: str) -> bytes:
    claims = {"iss": "i", "aud": "weir", "sub": "alice", "exp": NOW_S + 60}
    return b"Bearer " + jwt.encode(claims, KEYS[name], "EdDSA", {"kid": name}).encode()


class Host:
    """An issuer, the clock of the process that asks it, and how often it was asked."""

    def __init__(self, *names: str) -> None:
        self.now_s = 1000.0
        self.content = key_set(*names)
        self.is_away = False
        self.fetched = 0

    def fetch(self, _url: str) -> bytes:
        self.fetched += 1
        if self.is_away:
            raise ConnectionRefusedError("refused")
        return self.content

    def source(self, url: str) -> FetchedKeySet:
        return FetchedKeySet(url, self.fetch, lambda: self.now_s)


class Process:
    """A gate, and what feeds it with keys of issuers."""

    def __init__(self, folder: Path, host: Host, keys: str = URL) -> None:
        self.host = host
        self.gate = Gate(lambda: NOW_S)
        self.issuers = Issuers(self.gate, folder, host.source)
        self.rows = [Issuer(issuer="i", audience="weir", keys=keys)]

    def takes(self, name: str) -> bool:
        try:
            return self.gate.principal_of(Shown(token(name))).name == "alice"
        except WeirError:
            return False

    async def start(self) -> None:
        async with asyncio.TaskGroup() as background:
            await self.issuers.start(self.rows, background)

    async def look(self, after_s: float = 0.0) -> None:
        """Looks as after this time, and waits until what was begun has ended."""
        self.host.now_s += after_s
        async with asyncio.TaskGroup() as background:
            await self.issuers.look(background)


async def test_an_issuer_changes_its_keys(tmp_path: Path) -> None:
    process = Process(tmp_path, host := Host("old"))
    await process.start()
    assert (process.takes("old"), host.fetched) == (True, 1)
    host.content = key_set("old", "new")
    await process.look(REFRESH_S - 1)
    assert host.fetched == 1
    await process.look(1)
    assert (process.takes("old"), process.takes("new")) == (True, True)
    host.content = key_set("new")
    await process.look(REFRESH_S)
    # The gate has remembered the old one's token, and forgets it.
    assert (process.takes("old"), process.takes("new"), host.fetched) == (False, True, 3)


async def test_a_token_with_an_unknown_key_has_the_set_fetched_once_in_ten_seconds(tmp_path: Path) -> None:
    process = Process(tmp_path, host := Host("old"))
    await process.start()
    for _ in range(int(RETRY_S) * 3):  # a storm for 30 s
        for _ in range(5):
            assert not process.takes("new")
        await process.look(1)
    assert host.fetched == 1 + 3
    host.content = key_set("old", "new")
    assert not process.takes("new")
    await process.look(RETRY_S)
    assert process.takes("new")
    await process.look(RETRY_S)
    assert host.fetched == 1 + 3 + 1


async def test_the_last_good_copy_stays_while_the_issuer_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "weir.access")
    process = Process(tmp_path, host := Host("old"))
    await process.start()
    host.is_away = True
    await process.look(REFRESH_S)
    host.is_away, host.content = False, b"<html>back soon"
    await process.look(RETRY_S)
    assert (process.takes("old"), host.fetched) == (True, 3)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"the key set {URL} can't be fetched: refused; its last copy stays in use"
    host.content = key_set("new")
    await process.look(RETRY_S)
    assert (process.takes("old"), process.takes("new")) == (False, True)
    assert caplog.records[-1].getMessage() == f"the key set {URL} can be fetched again"


async def test_an_issuer_that_is_away_at_the_start_is_found_later(tmp_path: Path) -> None:
    process = Process(tmp_path, host := Host("old"))
    host.is_away = True
    await process.start()
    assert not process.takes("old")
    host.is_away = False
    await process.look(RETRY_S)
    assert process.takes("old")


async def test_a_start_does_not_wait_for_an_issuer_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weir.cluster.access.issuers.FETCH_TIMEOUT_S", 0.01)
    answers = threading.Event()
    host = Host("old")
    process = Process(tmp_path, host)
    process.issuers._make_fetched = lambda url: FetchedKeySet(
        url, lambda _url: host.content if answers.wait(20.0) else b"", lambda: host.now_s
    )
    async with asyncio.TaskGroup() as background:
        await process.issuers.start(process.rows, background)
        assert not process.takes("old")
        await process.issuers.look(background)  # the fetch runs: there is no second one
        answers.set()
    assert process.takes("old")


async def test_a_key_set_in_a_file_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys.json"
    file.write_bytes(key_set("old"))
    process = Process(tmp_path, Host(), "keys.json")  # relative to the policy's folder
    await process.start()
    assert process.takes("old")
    write(file, key_set("new"))
    await process.look()
    assert (process.takes("old"), process.takes("new")) == (False, True)
    write(file, b"{}")
    await process.look()
    await process.look()
    assert process.takes("new")
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line == f'key set {file}: the key set has no list "keys"; what it said before stays in force'


async def test_a_changed_policy_keeps_the_key_sets_that_it_still_names(tmp_path: Path) -> None:
    process = Process(tmp_path, host := Host("old"))
    await process.start()
    process.issuers.use([*process.rows, Issuer(issuer="j", audience="weir", keys="https://other/")])
    assert (process.takes("old"), host.fetched) == (True, 1)
    await process.look()
    assert host.fetched == 2
    process.issuers.use([])
    assert not process.takes("old")


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


@contextmanager
def web_server(answer: Any) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/keys"
        finally:
            server.shutdown()
            thread.join()


def send(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    try:
        handler.wfile.write(body)
    except OSError:
        pass  # the client has left


def test_a_key_set_is_fetched() -> None:
    with web_server(lambda handler: send(handler, key_set("old"))) as url:
        assert fetch_key_set(url) == key_set("old")


@pytest.mark.parametrize("status", [301, 302, 404, 500])
def test_an_error_and_a_redirect_are_no_key_set(status: int) -> None:
    with (
        web_server(lambda handler: send(handler, key_set("old"), status, Location="http://127.0.0.1:1/")) as url,
        pytest.raises(OSError, match=str(status)),
    ):
        fetch_key_set(url)


def test_a_huge_key_set_is_not_read_to_its_end() -> None:
    with (
        web_server(lambda handler: send(handler, b" " * (MAX_SET_BYTES + 2))) as url,
        pytest.raises(ValueError, match=f"more than {MAX_SET_BYTES} bytes"),
    ):
        fetch_key_set(url)


def test_a_key_set_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_sets, "FETCH_TIMEOUT_S", 0.05)
    left = threading.Event()

    def trickle(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while not left.wait(0.01):
                handler.wfile.write(b" ")
        except OSError:
            pass

    with web_server(trickle) as url:
        with pytest.raises(OSError, match=r"it takes more than|timed out"):
            fetch_key_set(url)
        left.set()

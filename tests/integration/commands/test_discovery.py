"""Commands and the servers of this machine: found whatever their folders, never guessed, and with their data again."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import nats
import pytest

from tests.support.models.zoo import write_identity
from tests.support.servers.forked_commands import run_weir
from tests.support.servers.free_ports import free_port
from tests.support.servers.weir_server import Server, clean_environment
from tests.support.waiting import wait_until

Start = Callable[..., Server]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a command as the user of this test, from another folder than the servers'."""

    def ran(*words: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        environment = {**clean_environment(tmp_path), "XDG_DATA_HOME": str(tmp_path / "share")}
        with (tmp_path / "out").open("w+") as out, (tmp_path / "errors").open("w+") as errors:
            status = run_weir(words, environment, out.fileno(), errors.fileno()).wait(40)
            done = subprocess.CompletedProcess(
                words, status, (tmp_path / "out").read_text(), (tmp_path / "errors").read_text()
            )
        assert code is None or status == code, done
        return done

    return ran


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers of this user, each with a folder and a data folder of its own."""
    started: list[Server] = []

    def begin(name: str, *options: str) -> Server:
        folder = tmp_path / name
        write_identity(folder / "models", "fast", "INT64")
        share = {"XDG_DATA_HOME": str(tmp_path / "share")}
        started.append(Server(folder, folder / "models", *options, environment=share))
        return started[-1]

    yield begin
    for server in started:
        if server.process.poll() is None:
            assert server.stop() == 0
        server.close()


async def dead_letters(server: Server, adds: int = 0) -> int:
    """How many dead letters a server has, once this many have been added."""
    client = await nats.connect(server.nats_url)
    try:
        for _ in range(adds):
            await client.jetstream().publish("dead.fast", b"{}")
        return (await client.jetstream().stream_info("DEAD")).state.messages
    finally:
        await client.close()


def advice(status: str) -> str:
    """What `weir status --json` says to do about dead letters."""
    (found,) = (problem for problem in json.loads(status)["problems"] if problem["kind"] == "dead letters")
    return str(found["advice"])


def test_two_servers_with_folders_of_their_own_are_told_apart(start: Start, run: Run, tmp_path: Path) -> None:
    first_data, second_data = tmp_path / "one" / "data", tmp_path / "two" / "data(2)"
    first = start("one", f"--data-dir={first_data}")
    assert asyncio.run(dead_letters(first, 1)) == 1
    status = run("status", "--json", code=None)
    assert f"http://{first.http_place}, " in status.stderr, "the only server is found in a folder of any name"
    assert "`weir dead list`" in advice(status.stdout), "nothing was given that a further command needs"
    second = start("two", f"--data-dir={second_data}")
    assert asyncio.run(dead_letters(second, 1)) == 1

    # What changes something acts on none of them, and says how each is chosen.
    chosen = [f"--data-dir {first_data}", f"--data-dir '{second_data}'"]
    for command in ("dead purge --all --yes", "dead replay --all", "rollback fast", "traffic set fast 1=1"):
        said = run(*command.split(), code=2).stderr
        for option, server in zip(chosen, (first, second), strict=True):
            assert f"\n  {option}   (http://{server.http_place}, nats://127.0.0.1:" in said
    assert [asyncio.run(dead_letters(server)) for server in (first, second)] == [1, 1]

    # A printed command leads to the server that was asked, from any folder.
    command = f"weir dead list --data-dir '{second_data}'"
    assert f"`{command}`" in advice(run("status", "--json", f"--data-dir={second_data}", code=None).stdout)
    assert run(*shlex.split(command)[1:]).stdout.count("fast") == 1
    run("dead", "purge", "--all", "--yes", f"--data-dir={second_data}")
    assert [asyncio.run(dead_letters(server)) for server in (first, second)] == [1, 0]

    # Other programs, and commands that are given the address alone, get the password of the server.
    assert run("status", "--nats-url", f"--data-dir={second_data}").stdout == f"{second.nats_url}\n"
    place = f"nats://localhost:{second.nats_url.rpartition(':')[2]}"
    (tmp_path / "pushed").mkdir()
    pushed = write_identity(tmp_path / "pushed", "pushed", "INT64")
    assert "\npushed: 2 files, " in run("push", str(pushed), "--list", f"--nats={place}").stdout

    # A killed server is not found, whatever became of its process id.
    os.kill(second.process.pid, signal.SIGKILL)
    wait_until(lambda: second.process.poll() is not None)
    assert f"http://{first.http_place}, " in run("status", "--nats-url").stderr
    assert len(list((tmp_path / "share" / "weir" / "servers").iterdir())) == 2, "nothing has removed its entry yet"
    assert first.stop() == 0
    run("status", code=2)


def test_a_project_has_data_of_its_own_and_finds_that_of_its_port(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop" / "models").mkdir(parents=True)
    (tmp_path / "shop" / ".git").touch()
    monkeypatch.chdir(tmp_path / "shop" / "models")
    port = free_port()
    console = f"127.{random.randint(1, 254)}.{random.randint(0, 255)}.{random.randint(2, 254)}"
    home = tmp_path / "share" / "weir"
    with socket.create_server((console, 8080)):
        server = start("server", f"--http-port={port}", f"--console-address={console}")
        assert server.printed_value("data").startswith(f"{home}/shop-")
        assert server.printed_value("data").endswith(f"-{port}")
        moved = re.search(r"^  console +(http://\S+) \(port 8080 is taken\)$", server.printed(), re.MULTILINE)
        assert moved, server.printed()
        with urllib.request.urlopen(moved[1]) as page:
            assert b"<title>" in page.read()
    assert server.stop() == 0
    (home / f"{port}").mkdir()
    found = start("other", f"--http-port={port}", "--allow-console=false")
    row = next(line for line in found.printed().splitlines() if line.startswith("  data "))
    assert row.split()[1] == server.printed_value("data"), "a project that has data keeps it"
    assert found.stop() == 0
    monkeypatch.chdir(tmp_path)
    upgraded = start("upgraded", f"--http-port={port}", "--allow-console=false")
    row = next(line for line in upgraded.printed().splitlines() if line.startswith("  data "))
    assert row.split(maxsplit=1)[1] == f"{home / str(port)} (of the HTTP port, as in earlier releases)"

"""Commands that talk to a running server find the one of this machine, all in the same way.

Errors leave task groups as they were raised, in every release of Python.
"""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from weir.commands import dead_letters
from weir.commands import push as pushing
from weir.commands.app import main
from weir.commands.batch_jobs import batch_client
from weir.commands.roles import settings_of
from weir.commands.running_server import BrokerTarget, local_servers, unwrap_exception_groups, write_addresses
from weir.commands.status import watch as watching
from weir.options import options_of

StartServer = Callable[[str, int], Path]


@pytest.fixture(autouse=True)
def _own_data_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    for variable in ("WEIR_NATS_URL", "WEIR_URL", "WEIR_DATA_DIR"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts a process that looks like the nats-server of a `weir serve`; returns the data folder."""
    with ExitStack() as stack:

        def start(name: str, nats_port: int) -> Path:
            folder = tmp_path / "weir" / name
            folder.mkdir(parents=True)
            command = [sys.executable, "-c", "print(flush=True); input()", "nats-server.conf"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.callback(process.communicate, b"\n")
            assert process.stdout is not None
            process.stdout.readline()  # /proc shows its own command line from here on
            ports = json.dumps({"nats": [f"nats://127.0.0.1:{nats_port}"]})
            (folder / f"nats-server_{process.pid}.ports").write_text(ports)
            (folder / "nats-server_999999999.ports").write_text(ports.replace("7", "6"))  # of one that was killed
            write_addresses(folder, {"nats_url": f"nats://127.0.0.1:{nats_port}", "http": f"127.0.0.1:{name}"})
            return folder

        yield start


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> list[BrokerTarget]:
    """The brokers that `weir status`, `weir dead list` and `weir push --list` talk to, in order."""
    asked: list[BrokerTarget] = []

    def record(broker: BrokerTarget, *_: Any) -> int:
        asked.append(broker)
        return 0

    monkeypatch.setattr(watching, "show", record)
    monkeypatch.setattr(dead_letters, "list_letters", record)
    monkeypatch.setattr(pushing, "run", record)
    return asked


@pytest.fixture
def urls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URLs that `weir batch` asks."""
    asked: list[str] = []

    def record(client: batch_client.JobsClient) -> list[dict[str, Any]]:
        asked.append(client.url)
        return []

    monkeypatch.setattr(batch_client.JobsClient, "list", record)
    return asked


BROKER_COMMANDS = (["status"], ["dead", "list"], ["push", "--list"])
DEFAULTS = {key: option.default for key, option in options_of("scheduler").items()}
ALL_COMMANDS = (*BROKER_COMMANDS, ["batch", "list"])


def ran(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def test_all_commands_find_the_only_server_and_name_it(
    start_server: StartServer, brokers: list[BrokerTarget], urls: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = start_server("8123", 7777)
    for command in ALL_COMMANDS:
        assert ran(*command) == 0
        expected = f"found on this machine: http://127.0.0.1:8123, nats://127.0.0.1:7777, data folder {folder}\n"
        assert capsys.readouterr().err.endswith(expected)
    assert brokers == [BrokerTarget("nats://127.0.0.1:7777")] * 3
    assert urls == ["127.0.0.1:8123"]


def test_the_data_folder_of_the_environment_is_looked_at_too(
    start_server: StartServer,
    brokers: list[BrokerTarget],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container, whose server has its folder on a volume."""
    folder = start_server("8123", 7777)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "another"))
    assert local_servers() == []
    monkeypatch.setenv("WEIR_DATA_DIR", str(folder))
    assert [server.data_dir for server in local_servers()] == [folder]
    assert ran("status") == 0
    assert brokers == [BrokerTarget("nats://127.0.0.1:7777")]
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert len(local_servers()) == 1, "a folder counts once"


def test_of_several_servers_one_is_to_be_named(
    start_server: StartServer, brokers: list[BrokerTarget], urls: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = start_server("8123", 7777), start_server("8124", 7778)
    for command in ALL_COMMANDS:
        assert ran(*command) == 2
        error = capsys.readouterr().err
        assert str(first) in error
        assert str(second) in error
        assert ("--url HOST:PORT" if command[0] == "batch" else "--nats URL") in error
        assert ran(*command, "--data-dir", str(second)) == 0
        assert capsys.readouterr().err == ""
    assert {broker.url for broker in brokers} == {"nats://127.0.0.1:7778"}
    assert urls == ["127.0.0.1:8124"]


def test_a_named_server_is_not_looked_for(
    start_server: StartServer, brokers: list[BrokerTarget], urls: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    start_server("8123", 7777)
    start_server("8124", 7778)
    for command in BROKER_COMMANDS:
        assert ran(*command, "--nats", "nats://elsewhere:1") == 0
    assert ran("batch", "list", "--url", "elsewhere:2") == 0
    assert capsys.readouterr().err == ""
    assert {broker.url for broker in brokers} == {"nats://elsewhere:1"}
    assert urls == ["elsewhere:2"]


def test_without_a_server_the_usual_address_is_asked(brokers: list[BrokerTarget], urls: list[str]) -> None:
    for command in ALL_COMMANDS:
        assert ran(*command) == 0
    assert {broker.url for broker in brokers} == {"nats://localhost:4222"}
    assert all("select it with --nats URL" in broker.hint for broker in brokers)
    assert urls == ["localhost:8000"]


def test_a_folder_without_a_server_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ALL_COMMANDS:
        assert ran(*command, "--data-dir", str(tmp_path)) == 2
        assert f"no weir serve runs with data folder {tmp_path}" in capsys.readouterr().err


def test_addresses_of_an_earlier_server_are_not_taken(start_server: StartServer) -> None:
    folder = start_server("8123", 7777)
    assert [server.http for server in local_servers()] == ["127.0.0.1:8123"]
    write_addresses(folder, {"nats_url": "nats://127.0.0.1:9", "http": "127.0.0.1:1"})
    assert [server.http for server in local_servers()] == [""]
    assert stat.S_IMODE((folder / "addresses.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("place", ["127.0.0.1:7777", "localhost:7777"])
def test_the_password_of_a_local_server_is_found_in_its_folder(
    start_server: StartServer, brokers: list[BrokerTarget], place: str
) -> None:
    folder = start_server("8123", 7777)
    file = folder / "nats-url"
    file.write_text("nats://weir:secret@127.0.0.1:7777\n")
    file.chmod(0o600)
    for command in BROKER_COMMANDS:
        for named in ([], ["--nats", f"nats://{place}"], ["--data-dir", str(folder)]):
            assert ran(*command, *named) == 0
    assert {(broker.access.user, broker.access.password) for broker in brokers} == {("weir", "secret")}
    brokers.clear()
    # Whoever names a user, or another server, is taken at their word.
    for url in ("nats://me:mine@localhost:7777", "nats://localhost:7778", "nats://elsewhere:7777"):
        assert ran("status", "--nats", url) == 0
    assert {broker.access.user for broker in brokers} == {""}
    settings = settings_of("scheduler", {**DEFAULTS, "nats": f"nats://{place}"})
    assert (settings.nats_access.user, settings.nats_access.password) == ("weir", "secret")


def test_an_error_comes_out_of_its_groups() -> None:
    group = ExceptionGroup("outer", [ExceptionGroup("inner", [OSError("away"), TimeoutError("late")])])
    with pytest.raises(OSError, match="away"), unwrap_exception_groups(OSError, TimeoutError):
        raise group


def test_other_errors_are_not_hidden() -> None:
    with pytest.raises(ExceptionGroup, match="both"), unwrap_exception_groups(OSError):
        raise ExceptionGroup("both", [OSError("away"), ValueError("wrong")])
    with pytest.raises(ValueError, match="wrong"), unwrap_exception_groups(OSError):
        raise ValueError("wrong")

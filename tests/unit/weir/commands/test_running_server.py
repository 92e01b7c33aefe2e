"""Commands that talk to a running server find the one of this machine, all in the same way.

Errors leave task groups as they were raised, in every release of Python.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import typer.main

from weir.commands import dead_letters
from weir.commands import push as pushing
from weir.commands.app import app, main
from weir.commands.batch_jobs import batch_client
from weir.commands.batch_jobs.batch_client import JobsClient
from weir.commands.gateway_client import GatewayClient, client_of
from weir.commands.local.servers import ServerRegistration, local_servers, write_addresses
from weir.commands.roles import settings_of
from weir.commands.running_server import BrokerTarget, only_local_server, unwrap_exception_groups
from weir.commands.status import watch as watching
from weir.options import ROLES, options_of
from weir.options.option import UsageError

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
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
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
    assert brokers == [BrokerTarget("nats://127.0.0.1:7777")] * 3, "no option was given, so none is passed on"
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
        assert f"\n  --data-dir {first}   (http://127.0.0.1:8123, " in error
        assert f"\n  --data-dir {second}   (http://127.0.0.1:8124, " in error
        assert ("--url HOST:PORT" if command[0] == "batch" else "--nats URL") in error
        assert ran(*command, "--data-dir", str(second)) == 0
        assert capsys.readouterr().err == ""
    assert {broker.url for broker in brokers} == {"nats://127.0.0.1:7778"}
    assert {broker.option for broker in brokers} == {f" --data-dir {second}"}
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
    assert {broker.option for broker in brokers} == {" --nats nats://elsewhere:1"}
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


def test_servers_that_share_a_broker_count_as_one(start_server: StartServer) -> None:
    folder = start_server("8123", 7777)
    beside = ServerRegistration(None, "nats://localhost:7777")
    beside.announce({"nats_url": "nats://me:mine@localhost:7777", "http": "127.0.0.1:8124"})
    found = only_local_server(None, "--url HOST:PORT")
    assert found is not None
    assert (found.data_dir, found.http) == (folder, "127.0.0.1:8123")
    elsewhere = ServerRegistration(None, "nats://other:4222")
    elsewhere.announce({"nats_url": "nats://other:4222", "http": "127.0.0.1:8125"})
    for option, shown in (("--url HOST:PORT", "--url 127.0.0.1:8125"), ("--nats URL", "--nats nats://other:4222")):
        with pytest.raises(UsageError, match="several weir serve run on this machine") as refused:
            only_local_server(None, option)
        assert f"\n  {shown}   (http://127.0.0.1:8125, nats://other:4222)" in str(refused.value)
    beside.remove()
    elsewhere.remove()


def test_a_server_whose_broker_has_not_started_is_named(
    brokers: list[BrokerTarget], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    starting = ServerRegistration(tmp_path / "data")
    assert ran("status") == 1
    assert f"has not started yet: data folder {tmp_path / 'data'}" in capsys.readouterr().err
    assert brokers == []
    starting.remove()


def test_a_client_of_a_gateway_knows_the_option_that_selects_its_server(start_server: StartServer) -> None:
    assert client_of(JobsClient, "", None).option == "", "no server was found, and none was named"
    folder = start_server("8123", 7777)
    assert client_of(JobsClient, "", None).option == " --url 127.0.0.1:8123"
    assert client_of(JobsClient, "", folder).option == f" --data-dir {folder}"
    assert client_of(JobsClient, "localhost:8000", None).option == " --url localhost:8000"
    assert client_of(JobsClient, "https://a b", None).option == " --url 'https://a b'"


@pytest.mark.parametrize(("given", "option"), [((), ""), (("--url", "a:1"), " --url a:1")])
def test_a_report_without_copies_says_how_to_run_some(
    given: tuple[str, ...], option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(GatewayClient, "request", lambda *_: {"model": "m", "versions": [], "worst": []})
    assert ran("traffic", "report", "m", *given) == 0
    command = f"weir traffic shadow MODEL VERSION --share 20 --compare{option}"
    assert capsys.readouterr().out == f"m: no copies were compared: {command}\n"


def test_an_option_of_a_printed_command_has_no_password(brokers: list[BrokerTarget]) -> None:
    assert ran("status", "--nats", "nats://me:mine@a:1,tls://me:mine@b:2") == 0
    assert brokers[0].option == " --nats nats://a:1,tls://b:2"


URLS = (
    (["--nats", "nats://me:mine@a:1"], "nats://me:mine@a:1"),
    (["--nats", "nats://a:1"], "nats://a:1"),
    (["--nats", "nats://localhost:7777"], "nats://weir:p%2Fw@localhost:7777"),
    ([], "nats://weir:p%2Fw@127.0.0.1:7777"),
)


@pytest.mark.parametrize(("options", "url"), URLS)
def test_status_prints_the_url_of_the_broker_for_other_programs(
    options: list[str], url: str, start_server: StartServer, capsys: pytest.CaptureFixture[str]
) -> None:
    file = start_server("8123", 7777) / "nats-url"
    file.write_text("nats://weir:p%2Fw@127.0.0.1:7777\n")
    file.chmod(0o600)
    assert ran("status", "--nats-url", *options) == 0
    assert capsys.readouterr().out == f"{url}\n"


def test_status_prints_no_url_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("status", "--nats-url") == 1
    said = capsys.readouterr()
    assert (said.out, said.err.startswith("error: no weir serve was found. ")) == ("", True)


# What a command of each name needs, apart from the server: `MODEL` and so on.
OF_A_SERVER = {
    "audit": [],
    "access check": ["a", "infer"],
    "batch cancel": ["1"],
    "batch list": [],
    "batch pause": ["1"],
    "batch resume": ["1"],
    "batch retry": ["1"],
    "batch status": ["1"],
    "batch submit": ["--model=m", "--input=a", "--output=b"],
    "batch watch": ["1"],
    "dead list": [],
    "dead purge": ["--all", "--yes"],
    "dead replay": ["--all"],
    "dead show": ["1"],
    "history": ["m"],
    "infer": ["m"],
    "key create": ["a", "--role=r"],
    "key list": [],
    "key revoke": ["a"],
    "key rotate": ["a"],
    "perf": ["m"],
    "push": ["--delete=m"],
    "rollback": ["m"],
    "status": [],
    "top": [],
    "traffic clear": ["m"],
    "traffic ramp": ["m", "2", "--over=1m"],
    "traffic report": ["m"],
    "traffic set": ["m", "1=1"],
    "traffic shadow": ["m", "2", "--share=1"],
    "traffic show": ["m"],
}
OF_NO_SERVER = {"serve", *ROLES, "backends", "demo", "doctor", "init", "nats-permissions"}
"""They start something, or look at files and at the machine."""


def all_commands(command: Any, name: str = "") -> Iterator[str]:
    """The names of all commands in the application: "dead list"."""
    inner = getattr(command, "commands", None)  # of a group
    if inner is None:
        yield name
        return
    for word, one in inner.items():
        yield from all_commands(one, f"{name} {word}".strip())


def test_every_command_is_known_to_talk_to_a_server_or_to_none() -> None:
    assert set(all_commands(typer.main.get_command(app))) == OF_A_SERVER.keys() | OF_NO_SERVER


@pytest.mark.parametrize(("command", "arguments"), OF_A_SERVER.items())
def test_no_command_guesses_a_server(
    command: str, arguments: list[str], start_server: StartServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Above all none that changes something: it would change another server's models, jobs or dead letters."""
    first, second = start_server("8123", 7777), start_server("8124", 7778)
    assert ran(*command.split(), *arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "several weir serve run on this machine; choose one with --" in said.err
    for folder in (first, second):
        assert f"\n  --data-dir {folder}   (" in said.err


def test_an_error_comes_out_of_its_groups() -> None:
    group = ExceptionGroup("outer", [ExceptionGroup("inner", [OSError("away"), TimeoutError("late")])])
    with pytest.raises(OSError, match="away"), unwrap_exception_groups(OSError, TimeoutError):
        raise group


def test_other_errors_are_not_hidden() -> None:
    with pytest.raises(ExceptionGroup, match="both"), unwrap_exception_groups(OSError):
        raise ExceptionGroup("both", [OSError("away"), ValueError("wrong")])
    with pytest.raises(ValueError, match="wrong"), unwrap_exception_groups(OSError):
        raise ValueError("wrong")

"""The command line of `weir status`: which server it asks, and how often."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bus.broker_access import BrokerAccess
from weir.cli import main
from weir.named_broker import NamedBroker
from weir.status import watching
from weir.status.local_servers import local_servers


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("WEIR_NATS_URL", raising=False)
    monkeypatch.setattr(watching, "show", lambda *given: calls.append(given) or 0)
    monkeypatch.setattr(watching, "watch", lambda *given: calls.append(given) or 2)
    return calls


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Path]:
    """A process that looks like the nats-server of a `weir serve`, and the folder where it would have its data."""
    folder = tmp_path / "weir" / "8000"
    folder.mkdir(parents=True)
    command = [sys.executable, "-c", "print(flush=True); input()", "nats-server.conf"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # by then it goes by its own command line
    ports = json.dumps({"nats": ["nats://127.0.0.1:7777"]})
    (folder / f"nats-server_{process.pid}.ports").write_text(ports)
    (folder / "nats-server_999999999.ports").write_text(ports.replace("7777", "6666"))  # of one that was killed
    yield folder
    process.communicate(b"\n")


def ran(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["status", *arguments])
    return int(ended.value.code or 0)


def test_watch_may_stand_without_a_time(asked: list[tuple[Any, ...]]) -> None:
    for arguments in (("--watch",), ("--watch", "--json"), ("--watch", "5"), ("--watch=0.5", "--all")):
        assert ran("--nats", "nats://x", *arguments) == 2
    assert asked == [
        (NamedBroker("nats://x"), 2.0, False, False),
        (NamedBroker("nats://x"), 2.0, True, False),
        (NamedBroker("nats://x"), 5.0, False, False),
        (NamedBroker("nats://x"), 0.5, False, True),
    ]


def test_a_server_of_this_machine_is_found(asked: list[tuple[Any, ...]], server: Path) -> None:
    assert ran() == 0
    assert ran("--data-dir", str(server)) == 0
    assert [broker.url for broker, *_ in asked] == ["nats://127.0.0.1:7777"] * 2


def test_without_one_the_usual_port_is_asked(
    asked: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "show", lambda *given: asked.append(given) or watching.UNREACHABLE)
    assert ran() == 2
    assert asked == [(NamedBroker("nats://localhost:4222"), False, False)]
    assert "name it with --nats URL" in capsys.readouterr().err


def test_of_several_one_is_to_be_chosen(
    asked: list[tuple[Any, ...]], server: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = server.parent / "9000"
    other.mkdir()
    (found,) = [file for file in server.iterdir() if "999999999" not in file.name]
    (other / found.name).write_text(found.read_text())
    assert len(local_servers()) == 2
    assert ran() == 2
    assert str(other) in capsys.readouterr().err
    assert ran("--data-dir", str(server / "nowhere")) == 2
    assert asked == []


def test_how_it_is_spoken_to_is_told_as_to_all_commands(
    asked: list[tuple[Any, ...]], server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIR_NATS_USER", "weir-admin")
    monkeypatch.setenv("WEIR_NATS_PASSWORD", "secret")
    monkeypatch.setenv("WEIR_NATS_CERT", "cert.pem")
    assert ran("--nats-ca", "ca.pem", "--nats-key=key.pem") == 0
    access = BrokerAccess(ca="ca.pem", cert="cert.pem", key="key.pem", user="weir-admin", password="secret")
    assert asked == [(NamedBroker("nats://127.0.0.1:7777", access), False, False)]

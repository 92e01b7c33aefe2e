"""The command line of `weir status`: its interval and its credentials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weir.bus.nats.access import BrokerAccess
from weir.commands.app import main
from weir.commands.running_server import BrokerTarget
from weir.commands.status import watch as watching


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("WEIR_NATS_URL", raising=False)
    monkeypatch.setattr(watching, "show", lambda *given: calls.append(given) or 0)
    monkeypatch.setattr(watching, "watch", lambda *given: calls.append(given) or 2)
    return calls


def ran(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["status", *arguments])
    return int(ended.value.code or 0)


def test_watch_may_stand_without_a_time(asked: list[tuple[Any, ...]]) -> None:
    for arguments in (("--watch",), ("--watch", "--json"), ("--watch", "5"), ("--watch=0.5", "--all")):
        assert ran("--nats", "nats://x", *arguments) == 2
    target = BrokerTarget("nats://x", option=" --nats nats://x")
    assert asked == [
        (target, 2.0, False, False),
        (target, 2.0, True, False),
        (target, 5.0, False, False),
        (target, 0.5, False, True),
    ]


def test_how_it_is_spoken_to_is_told_as_to_all_commands(
    asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIR_NATS_USER", "weir-admin")
    monkeypatch.setenv("WEIR_NATS_PASSWORD", "secret")
    monkeypatch.setenv("WEIR_NATS_CERT", "cert.pem")
    assert ran("--nats", "nats://127.0.0.1:7777", "--nats-ca", "ca.pem", "--nats-key=key.pem") == 0
    access = BrokerAccess(ca="ca.pem", cert="cert.pem", key="key.pem", user="weir-admin", password="secret")
    assert asked == [
        (BrokerTarget("nats://127.0.0.1:7777", access, option=" --nats nats://127.0.0.1:7777"), False, False)
    ]

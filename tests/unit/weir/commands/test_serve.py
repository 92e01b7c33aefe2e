"""The startup block of `weir serve`, and the number of GPUs."""

from __future__ import annotations

import re
import socket
from typing import Any

import pytest

from weir.commands.preflight import Listener
from weir.commands.serve import StartupFacts, console_listener, render_startup_block
from weir.errors import StartError


def block(**changes: Any) -> str:
    facts: dict[str, Any] = {
        "http": "127.0.0.1:8000",
        "grpc": "127.0.0.1:8001",
        "metrics": "127.0.0.1:8002",
        "nats_url": "nats://127.0.0.1:4222",
        "data_dir": "/data",
        "models": [],
        "durability": {"ack_is_fsync": True, "reason": "it says so"},
    }
    return render_startup_block(StartupFacts(**{**facts, **changes}))


def test_names_every_address_and_the_data_folder() -> None:
    lines = [line.split() for line in block().splitlines()]
    assert ["HTTP", "http://127.0.0.1:8000"] in lines
    assert ["gRPC", "127.0.0.1:8001"] in lines
    assert ["metrics", "http://127.0.0.1:8002/metrics"] in lines
    assert ["NATS", "nats://127.0.0.1:4222"] in lines
    assert ["data", "/data"] in lines
    assert "ack = fsync: yes" in block()


def test_says_which_shared_memory_clients_may_name() -> None:
    assert "client shm" not in block()
    assert "  client shm  any object of shared memory\n" in block(client_memory="any object of shared memory")


def test_tells_what_the_gateway_found_out_of_durability() -> None:
    assert "ack = fsync: no (it syncs later)" in block(durability={"ack_is_fsync": False, "reason": "it syncs later"})
    text = block(durability={"ack_is_fsync": None, "reason": "it does not tell"})
    assert "ack = fsync: unknown (it does not tell)" in text
    assert "fsync: yes" not in text
    assert "fsync: yes" not in block(durability={})


def test_lists_models_in_columns_with_the_reason_of_a_failure() -> None:
    models = [
        {"name": "resnet", "versions": [1, 3], "state": "READY"},
        {"name": "broken", "versions": [], "state": "UNAVAILABLE", "reason": "no file"},
    ]
    header, good, bad = block(models=models).splitlines()[-3:]
    assert header.split() == ["model", "version", "state", "reason"]
    assert good.split() == ["resnet", "1,3", "READY"]
    assert bad.split() == ["broken", "-", "UNAVAILABLE", "no", "file"]
    assert header.index("reason") == bad.index("no file")
    assert header.index("state") == good.index("READY")


def test_ready_is_not_said_over_models_that_are_not() -> None:
    good, bad = {"name": "good", "state": "READY"}, {"name": "bad", "state": "UNAVAILABLE"}
    assert block(models=[good]).splitlines()[0].endswith(" is ready")
    assert block(models=[good, bad]).splitlines()[0].endswith(" has started, but 1 of 2 models is not ready")
    assert block(models=[bad, bad]).splitlines()[0].endswith(" has started, but 2 of 2 models are not ready")


def test_says_so_when_there_is_no_model() -> None:
    assert block().endswith("no models")


def test_passwords_are_not_printed() -> None:
    text = block(nats_url="nats://user:secret@a:4222,nats://b:4222")
    assert "secret" not in text
    assert "nats://***@a:4222,nats://b:4222" in text


def test_a_model_can_t_write_to_the_terminal() -> None:
    text = block(models=[{"name": "m\x1b[31m\n", "state": "READY"}])
    assert "\x1b" not in text
    assert "m?[31m" in text


def test_a_door_that_is_not_allowed_is_off() -> None:
    lines = [line.split() for line in block(http=None, metrics=None).splitlines()]
    assert ["HTTP", "off"] in lines
    assert ["metrics", "off"] in lines
    assert ["gRPC", "127.0.0.1:8001"] in lines


def test_a_reason_of_several_lines_is_one_line() -> None:
    reason = "Internal: ValueError: boo\n\nAt:\n  1/model.py(3): initialize\n\x1b[31m"
    models = [{"name": "m", "versions": [1], "state": "UNAVAILABLE", "reason": reason}]
    assert "Internal: ValueError: boo At: 1/model.py(3): initialize ?[31m" in block(models=models)


def console_of(**values: Any) -> Listener | None:
    chosen = {"console_port": None, "console_address": "127.0.0.1", "allow_console": True, "http_port": 8000, **values}
    return console_listener(chosen, [Listener("HTTP", "127.0.0.1", 8000)])


def test_the_console_is_an_extra_unless_its_port_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.commands.serve.check_listeners", lambda listeners: None)
    assert console_of() == Listener("console", "127.0.0.1", 8080)
    assert console_of(http_port=0) is None
    assert console_of(http_port=0, console_port=0) == Listener("console", "127.0.0.1", 0)
    assert console_of(console_port=9000, allow_console=False) is None


def test_a_taken_port_is_an_error_only_if_it_was_chosen(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"can't listen for console requests at 127.0.0.1:{port}"):
            console_of(console_port=port)
    with pytest.raises(StartError, match="HTTP requests and console requests"):
        console_of(console_port=8000)


def test_a_taken_default_port_moves_the_console_to_a_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr("weir.commands.serve.CONSOLE_PORT", taken.getsockname()[1])
        assert console_of() == Listener("console", "127.0.0.1", 0)
    monkeypatch.setattr("weir.commands.serve.CONSOLE_PORT", 8000)
    assert console_of() == Listener("console", "127.0.0.1", 0), "the server's own port is taken too"


def test_without_an_address_to_listen_on_there_is_no_console(caplog: pytest.LogCaptureFixture) -> None:
    assert console_of(console_address="192.0.2.1") is None
    assert "there is no console: can't listen for console requests at 192.0.2.1:0" in caplog.text
    assert "choose another address with --console-address" in caplog.text


def test_says_why_the_console_and_the_data_are_elsewhere_than_expected() -> None:
    text = block(console="127.0.0.1:41234", console_note="port 8080 is taken", data_note="of the HTTP port")
    assert re.search(r"^  console +http://127\.0\.0\.1:41234 \(port 8080 is taken\)$", text, re.MULTILINE)
    assert re.search(r"^  data +/data \(of the HTTP port\)$", text, re.MULTILINE)
    assert "(" not in block(console="127.0.0.1:8080")

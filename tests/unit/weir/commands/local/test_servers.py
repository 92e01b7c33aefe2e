"""Servers register themselves, and only those that run are found: by their locks, on this machine, of this user."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers.certificates import Authority
from weir.commands.local import servers
from weir.commands.local.servers import LocalServer, ServerRegistration, local_certificate, local_servers

ADDRESSES = {"nats_url": "nats://127.0.0.1:7777", "http": "127.0.0.1:8123", "grpc": "127.0.0.1:8124"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.delenv("WEIR_DATA_DIR", raising=False)
    return tmp_path / "share" / "weir" / "servers"


def test_a_server_is_found_whatever_its_folder(tmp_path: Path, home: Path) -> None:
    data = tmp_path / "anywhere" / "data"
    registration = ServerRegistration(data)
    assert local_servers() == [LocalServer(data, "")], "it is starting"
    registration.announce(ADDRESSES)
    expected = LocalServer(data, "nats://127.0.0.1:7777", "127.0.0.1:8123", "127.0.0.1:8124")
    assert local_servers() == local_servers(data) == [expected]
    assert local_servers(tmp_path / "other") == []
    (tmp_path / "link").symlink_to(data.parent)
    assert local_servers(tmp_path / "link" / "data") == [expected]
    registration.remove()
    assert local_servers() == []
    assert list(home.iterdir()) == []


def test_a_relative_folder_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    registration = ServerRegistration(Path("data"))
    monkeypatch.chdir("/")
    assert [one.data_dir for one in local_servers()] == [tmp_path / "data"]
    registration.remove()


def test_no_password_is_written(tmp_path: Path, home: Path) -> None:
    registration = ServerRegistration(None, "nats://me:mine@a:4222,tls://token@b:4222")
    assert local_servers() == [LocalServer(None, "nats://a:4222,tls://b:4222")]
    registration.announce({**ADDRESSES, "nats_url": "me:mine@a"})
    assert [one.nats_url for one in local_servers()] == ["a"]
    written = next(home.glob("*/addresses.json"))
    assert "mine" not in written.read_text()
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    registration.remove()


def test_a_killed_server_is_not_found_and_its_entry_goes(tmp_path: Path, home: Path) -> None:
    code = f"""
from pathlib import Path
from weir.commands.local.servers import ServerRegistration
registration = ServerRegistration(Path({str(tmp_path / "data")!r}))
registration.announce({ADDRESSES!r})
print(flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert [one.http for one in local_servers()] == ["127.0.0.1:8123"]
        process.kill()
    (left,) = home.iterdir()
    assert json.loads((left / "addresses.json").read_text())["http"] == "127.0.0.1:8123"
    assert local_servers() == []
    later = ServerRegistration(tmp_path / "later")
    assert not left.exists()
    assert [one.data_dir for one in local_servers()] == [tmp_path / "later"]
    later.remove()


def test_a_server_of_another_machine_with_the_same_home_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loopback addresses lead to other servers here, or to none. So it is with a container's network."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(servers, "_network", lambda: "another")
        registration = ServerRegistration(tmp_path / "data")
        assert len(local_servers()) == 1
    assert local_servers() == []
    registration.remove()


def test_the_home_of_another_user_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registration = ServerRegistration(tmp_path / "data")
    other = os.geteuid() + 1
    with monkeypatch.context() as another_user:
        another_user.setattr(os, "geteuid", lambda: other)
        assert local_servers() == []
        caplog.set_level("INFO")
        beside = ServerRegistration(tmp_path / "beside")
        assert "commands find this server by an option or WEIR_DATA_DIR only: " in caplog.text
    assert [one.data_dir for one in local_servers()] == [tmp_path / "data"]
    beside.remove()
    registration.remove()


def test_a_shared_home_is_not_led_astray_by_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registration = ServerRegistration(tmp_path / "data")
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o1777)
    (shared / "weir").symlink_to(tmp_path / "share" / "weir")
    monkeypatch.setenv("XDG_DATA_HOME", str(shared))
    assert local_servers() == []
    registration.remove()


def test_without_a_home_a_server_runs_unregistered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(servers, "data_home", homeless)
    caplog.set_level("INFO")
    registration = ServerRegistration(tmp_path)
    registration.announce(ADDRESSES)
    assert "commands find this server by an option or WEIR_DATA_DIR only: Could not determine home" in caplog.text
    assert local_servers() == []
    assert json.loads((tmp_path / "addresses.json").read_text()) == ADDRESSES
    registration.remove()


def test_entries_that_can_t_be_read_are_passed_over(tmp_path: Path, home: Path) -> None:
    registration = ServerRegistration(tmp_path / "data")
    (entry,) = home.iterdir()
    for text in ("", "{", "[]", "null", '{"data_dir": 1}'):
        (entry / "addresses.json").write_text(text)
        assert local_servers() == []
    (home / "file").touch()
    assert local_servers() == []
    registration.announce(ADDRESSES)
    assert len(local_servers()) == 1
    registration.remove()


def test_the_certificate_of_a_server_is_found_by_its_place(tmp_path: Path) -> None:
    pair = Authority(tmp_path).sign("server")
    registration = ServerRegistration(tmp_path / "data")
    places = {"http": "0.0.0.0:8123", "grpc": "10.0.0.1:8124"}
    registration.announce({**ADDRESSES, **places, "tls_cert": str(pair.cert), "grpc_tls_cert": str(pair.cert)})
    (server,) = local_servers()
    assert (server.http_place, server.grpc_place) == ("https://0.0.0.0:8123", "grpcs://10.0.0.1:8124")
    assert str(server).startswith("https://0.0.0.0:8123, ")
    pem = pair.cert.read_text()
    assert local_certificate("localhost", 8123) == local_certificate("10.0.0.1", 8124) == pem
    assert local_certificate("localhost", 8124) == "", "another server may listen there"
    assert local_certificate("weir.example", 8123) == local_certificate("localhost", 8125) == ""
    registration.announce({**ADDRESSES, **places})
    assert (local_servers()[0].http_place, local_servers()[0].grpc_place) == (places["http"], places["grpc"])
    assert local_certificate("localhost", 8123) == ""
    registration.remove()

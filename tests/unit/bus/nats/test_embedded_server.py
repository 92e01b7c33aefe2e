"""The embedded nats-server, each time a real one."""

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nats
import psutil
import pytest

from tests.support.waiting import wait_until
from weir.bus.nats import embedded_server
from weir.bus.nats.embedded_server import (
    MAX_PAYLOAD,
    STORE_OF_EARLIER_RELEASES_BYTES,
    STORE_SHARE,
    EmbeddedNats,
    NatsStartError,
    find_binary,
    url_of_folder,
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path / "data")
    yield server
    server.stop()


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def test_a_launched_server_is_the_one_that_start_waits_for(server: EmbeddedNats) -> None:
    server.launch()
    launched = server.pid
    assert launched is not None
    server.launch()
    assert port_of(server.start()) > 0
    assert server.pid == launched


def test_a_launched_server_can_be_stopped_before_it_is_ready(server: EmbeddedNats) -> None:
    server.launch()
    process = server.process
    server.stop()
    assert process is not None
    assert process.returncode is not None
    assert server.pid is None
    assert port_of(server.start()) > 0


async def test_jetstream_answers_as_soon_as_start_returns(server: EmbeddedNats) -> None:
    client = await nats.connect(server.start())
    await client.jetstream().add_stream(name="Q", subjects=["q"])
    assert (await client.jetstream().publish("q", b"x")).seq == 1
    assert client.max_payload == MAX_PAYLOAD
    await client.close()


async def test_a_killed_server_comes_back_on_its_port_with_what_it_acknowledged(server: EmbeddedNats) -> None:
    url = server.start()
    client = await nats.connect(url)
    await client.jetstream().add_stream(name="Q", subjects=["q"])
    await client.jetstream().publish("q", b"kept")
    await client.close()
    assert server.process is not None
    server.process.kill()
    server.process.wait()
    assert server.pid is None
    assert server.start() == url
    client = await nats.connect(url)
    assert (await client.jetstream().get_msg("Q", 1)).data == b"kept"
    await client.close()


def test_it_listens_on_loopback_and_nowhere_else(server: EmbeddedNats) -> None:
    url = server.start()
    listening = [item for item in psutil.Process(server.pid).net_connections() if item.status == psutil.CONN_LISTEN]
    assert [(item.laddr.ip, item.laddr.port) for item in listening] == [("127.0.0.1", port_of(url))]


def test_its_configuration_is_private_and_syncs_always(server: EmbeddedNats, tmp_path: Path) -> None:
    server.start()
    config = tmp_path / "data" / "nats-server.conf"
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
    assert '"sync_interval": "always"' in config.read_text()
    assert (tmp_path / "data" / "jetstream").is_dir()
    assert "Server is ready" in (tmp_path / "data" / "nats-server.log").read_text()


def test_a_folder_of_any_name_will_do(tmp_path: Path) -> None:
    server = EmbeddedNats(tmp_path / 'a "quoted" ünï $HOME name')
    try:
        server.start()
        assert (tmp_path / 'a "quoted" ünï $HOME name' / "jetstream").is_dir()
    finally:
        server.stop()


def test_a_folder_belongs_to_one_server_at_a_time(server: EmbeddedNats, tmp_path: Path) -> None:
    server.start()
    second = EmbeddedNats(tmp_path / "data")
    with pytest.raises(NatsStartError, match=rf"is in use by another server \(process {os.getpid()}\)") as refused:
        second.start()
    assert "\n" not in str(refused.value)
    assert server.pid is not None
    server.stop()
    second.start()
    second.stop()


def test_a_port_of_another_server_is_not_taken_for_its_own(server: EmbeddedNats, tmp_path: Path) -> None:
    port = port_of(server.start())
    second = EmbeddedNats(tmp_path / "other", port=port)
    with pytest.raises(NatsStartError, match=r"^nats-server did not start: .*address already in use"):
        second.start()
    assert second.pid is None


def test_a_port_in_use_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = EmbeddedNats(tmp_path, port=taken.getsockname()[1])
        with pytest.raises(NatsStartError, match=r"address already in use"):
            server.start()


def test_a_folder_that_can_t_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NatsStartError, match=r"^data folder .*file/data can't be used: Not a directory$"):
        EmbeddedNats(tmp_path / "file" / "data").start()


def test_a_cancelled_start_leaves_nothing_running(server: EmbeddedNats) -> None:
    with pytest.raises(NatsStartError, match=r"^interrupted"):
        server.start(cancelled=lambda: True)
    assert server.pid is None
    server.start()


def test_stop_ends_it_and_may_be_called_again(server: EmbeddedNats) -> None:
    server.start()
    pid = server.pid
    assert pid is not None
    server.stop()
    server.stop()
    assert server.pid is None
    assert not psutil.pid_exists(pid)


def test_there_is_no_url_before_the_first_start(server: EmbeddedNats) -> None:
    with pytest.raises(RuntimeError, match=r"before its first start"):
        _ = server.url


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from weir.bus.nats.embedded_server import EmbeddedNats\n"
        "server = EmbeddedNats(Path(sys.argv[1])); server.start(); print(server.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.kill()
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    # The lock went with them.
    successor = EmbeddedNats(tmp_path)
    successor.start()
    successor.stop()


def fake_binary(folder: Path, script: str) -> Path:
    binary = folder / "nats-server"
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(0o755)
    return binary


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("echo nats-server: v2.12.5", r"is 2\.12\.5; 2\.12\.6 or newer is needed$"),
        ("echo nats-server: v2.9.25", r"is 2\.9\.25; 2\.12\.6 or newer is needed$"),
        ("echo something else", r"is of an unknown version; 2\.12\.6 or newer is needed$"),
        ("exit 3", r"does not run: .* status 3\.$"),
    ],
)
def test_an_unsuitable_binary_is_an_error(script: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(NatsStartError, match=complaint):
        find_binary(fake_binary(tmp_path, script))


def test_newer_binaries_are_taken(tmp_path: Path) -> None:
    binary = fake_binary(tmp_path, "echo nats-server: v3.0.0")
    assert find_binary(binary) == binary


def test_a_missing_binary_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NatsStartError, match=r"does not run: .*No such file"):
        find_binary(tmp_path / "nowhere")


def test_without_a_path_the_packaged_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_binary().name.startswith("nats-server")


async def test_only_clients_with_the_password_are_accepted(server: EmbeddedNats, tmp_path: Path) -> None:
    url = server.start()
    await (await nats.connect(url)).close()
    with pytest.raises(nats.errors.Error, match="Authorization Violation"):
        await nats.connect(f"nats://127.0.0.1:{port_of(url)}", allow_reconnect=False)
    file = tmp_path / "data" / "nats-url"
    assert file.read_text() == f"{url}\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    server.stop()
    again = EmbeddedNats(tmp_path / "data", port=port_of(url))
    assert again.start() == url, "the password stays that of the folder"
    again.stop()


@pytest.mark.parametrize("fault", ["readable by others", "a link", "empty", "removed", "of another form"])
def test_a_password_that_others_may_know_is_replaced(server: EmbeddedNats, tmp_path: Path, fault: str) -> None:
    password = server.start().rpartition("@")[0]
    server.stop()
    file = tmp_path / "data" / "nats-url"
    assert url_of_folder(tmp_path / "data").startswith(password)
    if fault == "readable by others":
        file.chmod(0o640)
    elif fault == "a link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    elif fault == "removed":
        file.unlink()
    else:
        file.write_text("" if fault == "empty" else "http://a:b:c")
    assert url_of_folder(tmp_path / "data") == ""
    again = EmbeddedNats(tmp_path / "data")
    try:
        assert again.start().rpartition("@")[0] != password
        assert stat.S_IMODE(file.lstat().st_mode) == 0o600
    finally:
        again.stop()


def test_jetstream_may_store_what_the_volume_has_room_for_and_never_less_than_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Volume:
        f_bavail, f_frsize = 10 << 10, 1 << 20

    monkeypatch.setattr(os, "statvfs", lambda _: Volume)
    assert EmbeddedNats(tmp_path / "not" / "there").store_bytes == 9 << 30
    config = tmp_path / "nats-server.conf"
    config.write_text(json.dumps({"jetstream": {"max_file_store": 1 << 60}}))
    assert EmbeddedNats(tmp_path).store_bytes == 1 << 60  # its streams may have reserved it
    config.write_text(json.dumps({"jetstream": {}}))
    assert EmbeddedNats(tmp_path).store_bytes == 9 << 30
    (tmp_path / "jetstream" / "$G" / "streams" / "QUEUE").mkdir(parents=True)
    assert EmbeddedNats(tmp_path).store_bytes == STORE_OF_EARLIER_RELEASES_BYTES


def test_stored_messages_are_not_room_that_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jetstream").mkdir()
    (tmp_path / "jetstream" / "1.blk").write_bytes(os.urandom(8 << 20))
    status = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: status)  # others write to this disk, too
    with_messages = EmbeddedNats(tmp_path).store_bytes
    (tmp_path / "jetstream" / "1.blk").unlink()
    assert with_messages - EmbeddedNats(tmp_path).store_bytes == pytest.approx((8 << 20) * STORE_SHARE, rel=0.01)


def test_a_limit_of_memory_is_passed_on_to_go(server: EmbeddedNats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMEMLIMIT", raising=False)
    monkeypatch.setattr(embedded_server, "available_memory_bytes", lambda: 3 << 30)
    monkeypatch.setattr(embedded_server, "machine_memory_bytes", lambda: 64 << 30)
    server.start()
    assert psutil.Process(server.pid).environ()["GOMEMLIMIT"] == str(3 << 29)
    config = json.loads((server.data_dir / "nats-server.conf").read_text())
    assert config["jetstream"]["max_memory_store"] == 2 << 30
    assert config["jetstream"]["max_file_store"] == server.store_bytes

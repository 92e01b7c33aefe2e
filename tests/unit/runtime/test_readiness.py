"""A role's ties to its supervisor, each tried in a real process."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROLE = "from weir.runtime.readiness import announce_failure, announce_ready, watch_parent\nimport os, sys\n"


def announcement(code: str) -> str:
    """What a role running `code` writes to its ready pipe."""
    read_fd, write_fd = os.pipe()
    environment = {**os.environ, "WEIR_READY_FD": str(write_fd)}
    role = subprocess.Popen([sys.executable, "-c", ROLE + code], env=environment, pass_fds=[write_fd])
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        text = pipe.read()
    assert role.wait() == 0
    return text


def test_ready_line_holds_the_facts() -> None:
    line = announcement("announce_ready(http_port=8000, models=[{'name': 'ünï'}])")
    assert line.endswith("\n")
    assert json.loads(line) == {"ready": True, "http_port": 8000, "models": [{"name": "ünï"}]}


def test_failure_is_one_line() -> None:
    assert json.loads(announcement("announce_failure('port 8000\\n  is taken')")) == {"error": "port 8000 is taken"}


def test_only_the_first_announcement_counts() -> None:
    assert announcement("announce_ready(); announce_failure('late')").splitlines() == ['{"ready": true}']


def test_processes_of_a_role_do_not_inherit_its_ties() -> None:
    read_fd, write_fd = os.pipe()
    grandchild = (
        "import os\nnames = [name for name in os.environ if name.startswith('WEIR_')]\n"
        f"try: os.fstat({read_fd}); print(names, 'holds the lifeline')\n"
        "except OSError: print(names, 'free')"
    )
    # subprocess would close the descriptors by itself; code of users may use os.fork or close_fds=False.
    code = (
        f"watch_parent()\nimport subprocess\n"
        f"subprocess.run([sys.executable, '-c', {grandchild!r}], close_fds=False, check=True)"
    )
    environment = {**os.environ, "WEIR_LIFELINE_FD": str(read_fd)}
    ran = subprocess.run([sys.executable, "-c", ROLE + code], env=environment, pass_fds=[read_fd], capture_output=True)
    os.close(read_fd)
    os.close(write_fd)
    assert ran.stdout == b"[] free\n", ran.stderr


def test_a_role_without_supervisor_announces_nothing() -> None:
    code = ROLE + "watch_parent(); announce_ready(); announce_failure('x')"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=20)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")


def messages_to_systemd(folder: Path, code: str, count: int, **environment: str) -> list[bytes]:
    """What a process running `code` as a service of type `notify` sends, until `count` messages came or it has ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(folder / "notify"))
        receiver.settimeout(20)
        variables = {**os.environ, "NOTIFY_SOCKET": str(folder / "notify"), **environment}
        role = subprocess.Popen([sys.executable, "-c", ROLE + code], env=variables)
        try:
            if count:
                return [receiver.recv(100) for _ in range(count)]
            assert role.wait(20) == 0
            receiver.setblocking(False)
            with pytest.raises(BlockingIOError):
                receiver.recv(100)
            return []
        finally:
            role.kill()
            role.wait()


SERVE = """
import asyncio
async def main():
    announce_ready()
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC"} & os.environ.keys()
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_systemd_hears_that_a_role_is_ready_and_that_its_loop_turns(tmp_path: Path) -> None:
    messages = messages_to_systemd(tmp_path, SERVE, 3, WATCHDOG_USEC="30000000")
    assert messages == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]


def test_systemd_hears_of_the_supervisor_and_not_of_its_roles(tmp_path: Path) -> None:
    assert messages_to_systemd(tmp_path, "announce_ready()", 1) == [b"READY=1"]
    (tmp_path / "notify").unlink()
    code = "os.environ['WEIR_READY_FD'] = str(os.open(os.devnull, os.O_WRONLY)); announce_ready()"
    assert messages_to_systemd(tmp_path, code, 0) == []


def test_a_role_ends_at_once_when_its_supervisor_is_gone() -> None:
    read_fd, write_fd = os.pipe()
    code = ROLE + "watch_parent(); print('watching', flush=True)\nwhile True: pass"
    role = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "WEIR_LIFELINE_FD": str(read_fd)},
        pass_fds=[read_fd],
        stdout=subprocess.PIPE,
    )
    os.close(read_fd)
    with role:
        assert role.stdout is not None
        assert role.stdout.readline() == b"watching\n"
        assert role.poll() is None
        os.close(write_fd)
        assert role.wait(timeout=10) == 1


LIVING = """
import asyncio
async def live():
    announce_ready()
    print(os.environ.get("WEIR_ALIVE_FILE"), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
asyncio.run(live())
"""


def test_a_ready_role_touches_its_heartbeat_file_while_its_loop_runs(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    role = subprocess.Popen(
        [sys.executable, "-c", ROLE + LIVING],
        env={**os.environ, "WEIR_ALIVE_FILE": str(alive)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert role.stdin is not None
    assert role.stdout is not None
    assert role.stdout.readline() == "None\n"  # what the role starts does not inherit it
    os.utime(alive, (0, 0))
    deadline = time.monotonic() + 10
    while alive.stat().st_mtime == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert alive.stat().st_mtime > 0
    role.stdin.write("\n")
    role.stdin.close()
    assert role.wait(10) == 0
    role.stdout.close()


def test_without_an_event_loop_there_is_no_heartbeat_file(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    environment = {**os.environ, "WEIR_ALIVE_FILE": str(alive)}
    subprocess.run([sys.executable, "-c", ROLE + "announce_ready()"], env=environment, check=True)
    assert not alive.exists()


def test_a_file_that_can_not_be_touched_ends_no_role(tmp_path: Path) -> None:
    code = "import asyncio\nasync def live(): announce_ready()\nasyncio.run(live())"
    environment = {**os.environ, "WEIR_ALIVE_FILE": str(tmp_path / "missing" / "alive")}
    done = subprocess.run([sys.executable, "-c", ROLE + code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0
    assert "can not be touched" in done.stderr

"""A role's ties to its supervisor, each tried in a real process."""

import json
import os
import subprocess
import sys

ROLE = "from telemetry.readiness import announce_failure, announce_ready, watch_parent\nimport os, sys\n"


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


def test_what_a_role_starts_does_not_hold_its_ties() -> None:
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


def test_a_role_on_its_own_announces_to_nobody() -> None:
    code = ROLE + "watch_parent(); announce_ready(); announce_failure('x')"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=20)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")


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

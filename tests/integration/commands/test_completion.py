"""Shells complete model names from a running server, after `weir --install-completion` in the shell itself."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.servers.weir_server import Server

SCRIPTS = str(Path(sys.executable).parent)

needs_zsh = pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
needs_fish = pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's home, in which no shell is set up yet. The prompt is the same in all shells."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / ".bashrc").write_text("PS1='ready> '\nbind 'set enable-bracketed-paste off'\n")
    (folder / ".zshrc").write_text("PS1='ready> '\nunsetopt zle_bracketed_paste 2>/dev/null\n")
    return folder


def environment(home: Path, **variables: str) -> dict[str, str]:
    """The environment of a shell in which `weir` is the one of this Python."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WEIR_", "XDG_", "_"))}
    path = f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "HOME": str(home), "PATH": path, "TERM": "dumb", "COLUMNS": "200", **variables}


def install(shell: str, home: Path) -> str:
    """Run `weir --install-completion` in the shell, which typer recognises by its process."""
    done = subprocess.run(
        [shell, "-c", "weir --install-completion; exit $?" if shell != "fish" else "weir --install-completion; true"],
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def typed(shell: list[str], keys: str, expected: str, variables: Mapping[str, str], timeout_s: float = 20.0) -> str:
    """What a terminal shows after `keys`, up to `expected`, without bells; the shell starts first, and ends afterwards."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(shell[0], shell, dict(variables))
    shown, sent, deadline = "", False, time.monotonic() + timeout_s
    try:
        while expected not in shown and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    shown += os.read(terminal, 65536).decode(errors="replace").replace("\a", "")
            if not sent and "ready> " in shown:
                os.write(terminal, keys.encode())
                sent = True
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)
    return shown


@pytest.mark.parametrize(("shell", "tabs"), [("bash", 1), pytest.param("zsh", 2, marks=needs_zsh)])
def test_tab_completes_a_model_of_the_running_server(shell: str, tabs: int, server: Server, home: Path) -> None:
    """In zsh, the first TAB of a session only loads the function that typer installs."""
    assert f"{shell} completion installed" in install(shell, home)
    variables = environment(home, WEIR_URL=server.http_place)
    keys = "weir traffic show identity_FP3" + tabs * "\t"
    shown = typed([shell, "-i"], keys, "identity_FP32", variables)
    assert "identity_FP32" in shown, shown


@needs_fish
def test_fish_completes_a_model_of_the_running_server(server: Server, home: Path) -> None:
    assert "fish completion installed" in install("fish", home)
    completed = subprocess.run(
        ["fish", "-c", 'complete -C "weir history identity_FP3"'],
        env=environment(home, WEIR_URL=server.http_place),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert completed.stdout.split() == ["identity_FP32"], completed.stderr


def completed(words: str, home: Path, **variables: str) -> list[str]:
    """What bash is offered for the last of the `words`."""
    done = subprocess.run(
        ["weir"],
        env=environment(
            home,
            _WEIR_COMPLETE="complete_bash",
            COMP_WORDS=words.replace(" ", "\n"),
            COMP_CWORD=str(words.count(" ")),
            **variables,
        ),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    "command",
    [
        "weir traffic set",
        "weir traffic show",
        "weir traffic clear",
        "weir traffic ramp",
        "weir traffic shadow",
        "weir traffic report",
        "weir history",
        "weir rollback",
        "weir batch submit --model",
        "weir perf",
    ],
)
def test_every_command_with_a_model_completes_it(command: str, server: Server, home: Path) -> None:
    assert completed(f"{command} identity_FP3", home, WEIR_URL=server.http_place) == ["identity_FP32"]


def test_options_before_the_cursor_select_the_server(server: Server, home: Path) -> None:
    words = f"weir history --url {server.http_place} identity_FP3"
    assert completed(words, home, WEIR_URL="localhost:1") == ["identity_FP32"]


def test_a_url_may_be_that_of_the_broker(server: Server, home: Path) -> None:
    words = f"weir perf --protocol nats --url {server.nats_url} identity_FP3"
    assert completed(words, home) == ["identity_FP32"]


@pytest.mark.parametrize("command", ["list", "replay", "purge"])
def test_commands_of_the_broker_read_its_registry(command: str, server: Server, home: Path) -> None:
    words = f"weir dead {command} --nats {server.nats_url} --model identity_FP3"
    assert completed(words, home) == ["identity_FP32"]


def test_without_a_server_nothing_is_offered_and_nothing_is_printed(home: Path) -> None:
    assert completed("weir history i", home, WEIR_URL="127.0.0.1:1") == []
    assert completed("weir dead list --nats nats://127.0.0.1:1 --model i", home) == []

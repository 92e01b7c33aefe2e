"""Every command of the README, and of docs/first-hour.md, works in a fresh clone, without an installed Weir.

`make test` would run this test again: of it the installation runs here, and `.ci/run` the rest, in a fresh clone too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import pytest

from tests.support.docs.first_hour import TEMPLATE, scripts, write_programs
from tests.support.docs.pages import OWN_MODEL, ROOT, all_blocks, commands
from tests.support.interrupts import accept_interrupts
from tests.support.models import onnx_files

PAGE = "README.md"
TOUR = "docs/tour.md"
INSTALLATION = "docs/installation.md"
WRITE_MODEL = 'import onnx; from tests.support.models.onnx_files import graph; onnx.save(graph(), "my.onnx")'
LISTENING = "Files to try"
"""In the last line that `make serve` prints."""


class FirstHour:
    """A fresh clone in `folder`, with an environment of the person's own, which is active."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "clone"
        subprocess.run(["git", "clone", "--quiet", ROOT, self.folder], check=True)
        venv.create(folder / "own", with_pip=True, symlinks=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("WEIR_", "PYTHON", "VIRTUAL_ENV", "NATS_"))}
        self.environment = {**kept, "PATH": f"{folder / 'own' / 'bin'}{os.pathsep}{kept['PATH']}"}

    def run(self, command: str) -> str:
        """What a command printed; it must succeed."""
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout

    @contextmanager
    def running(self, command: str, ready: str) -> Iterator[None]:
        """A command that serves until Ctrl-C, from the line that has `ready` on."""
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=accept_interrupts,
        )
        assert process.stdout is not None
        try:
            assert any(ready in line for line in process.stdout), f"{command} ended"
            yield
        finally:
            os.killpg(process.pid, signal.SIGINT)
            process.stdout.read()
            process.stdout.close()
            process.wait(60)


LEAN = """
import weir.console.api.page as page, weir.gateway.http.openapi.docs_page as docs, importlib.util as util
print(*sorted(path.name for path in page.WEB_FOLDER.glob("vendor/*.mjs")), docs.VENDOR.is_dir())
print([name for name in ("textual", "obstore", "opentelemetry", "nkeys") if util.find_spec(name)])
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_the_page_of_the_installation_begins_with_serves_a_model(tmp_path: Path) -> None:
    hour = FirstHour(tmp_path)
    first = next(block for block in all_blocks() if block.page == INSTALLATION and block.language == "bash")
    assert first.text.splitlines() == ["make web", "pip install '.[cpu]'"]
    for line in first.text.splitlines():
        hour.run(line)
    libraries, extras = hour.run(f"cd / && python -c '{LEAN}'").splitlines()
    assert libraries == "echarts.esm.min.mjs hooks.mjs htm.mjs preact.mjs tabulator_esm.min.mjs True"
    assert extras == "[]"
    onnx.save(onnx_files.graph(), hour.folder / "digits.onnx")
    assert "models/digits has these files" in hour.run("weir init digits.onnx")
    ports = "--http-port=0 --grpc-port=0 --metrics-port=0 --data-dir=data"
    with hour.running(f"weir serve models {ports}", "READY"):
        assert "response of digits, version 1" in hour.run("weir infer digits --data-dir=data")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_the_page(tmp_path: Path) -> None:
    hour = FirstHour(tmp_path)
    lines = [line for page, line in commands() if page == PAGE]
    assert lines[:3] == ["make demo", "make test", "make serve"]
    assert "Stopped cleanly" in hour.run("make demo")
    hour.run("make .venv/.installed-for-tests")
    with hour.running("make serve", LISTENING):
        for line in lines[3:]:
            if line.startswith(("curl", ".venv/bin/weir status")) and not line.startswith(OWN_MODEL):
                hour.run(line)
        (program,) = [block.text for block in all_blocks() if block.page == TOUR and block.language == "python"]
        (hour.folder / "program.py").write_text(program)
        assert ":sql" in hour.run(".venv/bin/python program.py")
    (installation,) = [line for line in lines if line.startswith("pip install")]
    hour.run(f"{installation} --quiet --disable-pip-version-check")
    assert hour.run("cd / && weir --version").startswith("weir ")
    init, serve, curl = [line for line in lines if line.startswith(OWN_MODEL)]
    hour.run(f".venv/bin/python -c '{WRITE_MODEL}'")
    hour.run(init)
    with hour.running(serve, "READY"):
        assert '"outputs"' in hour.run(curl)
    known = {"make", "curl", ".venv/bin/weir", "pip", "weir"}
    assert {line.split()[0] for line in lines} <= known, "each kind of command is run above"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_command_of_the_first_hour(tmp_path: Path) -> None:
    hour = FirstHour(tmp_path)
    install, _, serve, rest = scripts()
    hour.run(f"set -e\n{install}")
    write_programs(hour.folder)
    active = ". env/bin/activate && "
    # The environment of the page has no package that writes ONNX files.
    hour.run(f"{active}{TEMPLATE}")
    with hour.running(f"{hour.folder}/env/bin/{serve}", "READY"):
        printed = hour.run(f"set -e\n{active}true\n{rest}")
    assert "on disk in stream QUEUE\nsucceeded " in printed
    assert "healthy: " in printed

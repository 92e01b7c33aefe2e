"""Every command of docs/first-hour.md, in its order, but the installation, which test_first_commands.py runs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import onnx
import pytest

from tests.support.docs.first_hour import scripts, write_programs
from tests.support.docs.pages import OWN_MODEL, commands
from tests.support.models import onnx_files
from tests.support.servers.demo import DRAWN_PORTS, environment

BIN = Path(sys.executable).parent

SLEEP = """#!/bin/sh
served() {{ curl -s http://{http}/v2/models/my/stats | grep -o '"success":{{"count":[0-9]*' | grep -o '[0-9]*$'; }}
before=$(served)
until [ "$(served)" -gt $((before + 20)) ]; do {sleep} 0.02; done
"""
"""Waits for what the page waits for: that the load has begun."""


def own_environment(*folders: Path) -> dict[str, str]:
    """This process's environment, with programs of these folders and of this Python before all others."""
    return {**environment(), "PATH": os.pathsep.join(map(str, [*folders, BIN, os.environ["PATH"]]))}


class ServedModel:
    """The page's server, on free ports. `places` has its addresses by the documented ones."""

    def __init__(self, command: str, folder: Path) -> None:
        words = [*shlex.split(command), *DRAWN_PORTS, "--console-port=0"]
        self._log = folder / "log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                words, cwd=folder, env=own_environment(), stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self.process.stdout is not None
        rows: list[list[str]] = []
        while rows[-1:] != [["my", "1", "READY"]]:
            line = self.process.stdout.readline()
            assert line, self.log()
            rows.append(line.split())
        printed = {row[0]: row[1].removeprefix("http://") for row in rows if len(row) == 2}
        self.places = {
            "localhost:8000": printed["HTTP"],
            "localhost:8001": printed["gRPC"],
            "localhost:8080": printed["console"],
        }

    def log(self) -> str:
        return self._log.read_text()

    def here(self, text: str) -> str:
        for documented, real in self.places.items():
            text = text.replace(documented, real)
        return text

    def stop(self) -> int:
        self.process.terminate()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(60)


@pytest.mark.timeout(180)
def test_the_page_from_the_model_to_the_console(tmp_path: Path) -> None:
    folder = tmp_path / "clone"
    folder.mkdir()
    onnx.save(onnx_files.graph(), folder / "my.onnx")
    _, make, serve, rest = scripts()
    run(make, folder, own_environment())
    write_programs(folder)
    server = ServedModel(serve, folder)
    try:
        for program in folder.glob("*.py"):
            program.write_text(server.here(program.read_text()))
        sleep = tmp_path / "bin" / "sleep"
        sleep.parent.mkdir()
        sleep.write_text(SLEEP.format(http=server.places["localhost:8000"], sleep=shutil.which("sleep")))
        sleep.chmod(0o755)
        printed = run(server.here(rest), folder, own_environment(sleep.parent))
        assert "OUT FP32 [1, 8]" in printed, "client.py"
        assert "on disk in stream QUEUE\nsucceeded " in printed, "event.py"
        assert '"status":"succeeded"' in printed.replace(" ", ""), "the asynchronous request"
        assert "succeeded: 1,000 items" in printed, "the batch job"
        assert '{"item":0,"source":"items.jsonl:1","outputs":{"OUT":[' in printed
        assert failed_requests((folder / "load.txt").read_text()) == [0]
        assert "was killed by SIGKILL" in server.log()
        assert "healthy: 1 host, 1 gateway, 1 scheduler, 1 worker, 1 model" in printed
        with urllib.request.urlopen(f"http://{server.places['localhost:8080']}/") as console:
            assert console.status == 200
    finally:
        status = server.stop()
    assert status == 0, server.log()


def run(script: str, folder: Path, variables: dict[str, str]) -> str:
    """What a script printed, errors too; each of its commands must succeed."""
    done = subprocess.run(
        ["bash", "-ec", script], cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def failed_requests(table: str) -> list[int]:
    """The failed requests of each level in what `weir perf` prints."""
    rows = [line.split() for line in table.splitlines()]
    place = next(number for number, row in enumerate(rows) if "failed" in row)
    back = rows[place].index("failed") - len(rows[place])
    return [int(row[back]) for row in rows[place + 1 :] if row[:1] == ["8"]]


def test_the_readme_has_commands_of_the_page() -> None:
    _, make, serve, rest = scripts()
    of_readme = [line for page, line in commands() if page == "README.md" and line.startswith(OWN_MODEL)]
    init, served, asked = of_readme
    assert init == make.strip()
    assert serve.startswith(f"{served} ")
    assert asked in rest.splitlines()

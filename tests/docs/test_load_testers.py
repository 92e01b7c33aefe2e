"""The commands of the pages about load tests: `weir perf`, and Triton's perf_analyzer where it is installed."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.test_commands import PERF_ANALYZER
from tests.support.docs.pages import all_blocks, commands
from tests.support.servers.demo import Served, environment, in_venv
from weir.perf.report.document import PerfReport

PERF = ".venv/bin/weir perf "
SHORT = ("--measure=0.3", "--max-windows=1", "--warmup=0.1")
SHORT_ANALYZER = ("--measurement-interval", "300", "--stability-percentage", "999", "--max-trials", "3")

PROGRAM_VARIABLE = "WEIR_PERF_ANALYZER"
"""Names perf_analyzer where it is not on the PATH, as when it runs with the C library of a newer system."""


def of_kind(kind: str) -> list[str]:
    return [line for _, line in commands() if line.startswith(kind)]


@pytest.mark.parametrize("command", of_kind(PERF))
def test_weir_perf(command: str, served: Served) -> None:
    words = in_venv(command)
    # One level of a sweep is enough here.
    words = ["--concurrency=1:2" if word == "--concurrency=1:64:x2" else word for word in words]
    done = subprocess.run([*words, *SHORT], cwd=served.folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    if "--json" in words:
        (level,) = PerfReport.model_validate_json(done.stdout).levels
        assert level.succeeded > 0 == level.failed
    else:
        assert " requests failed" not in done.stdout
        assert done.stdout.startswith(f"model {words[2]}; ")


def test_the_table_of_the_page_has_todays_columns(served: Served) -> None:
    (command,) = of_kind(PERF)[:1]
    (shown,) = (
        following.text for block, following in itertools.pairwise(all_blocks()) if block.text.strip() == command
    )
    words = [word for word in in_venv(command) if not word.startswith("--concurrency")]
    done = subprocess.run([*words, *SHORT], cwd=served.folder, env=environment(), capture_output=True, text=True)
    assert done.stdout.splitlines()[1].split() == shown.splitlines()[1].split()


@pytest.fixture(scope="session")
def perf_analyzer() -> str:
    """The program. Version 0.1.0 of the package, which older systems get, has none."""
    program = os.environ.get(PROGRAM_VARIABLE) or shutil.which(PERF_ANALYZER.strip())
    if program is None:
        pytest.skip(
            f"perf_analyzer is not installed (pip install perf-analyzer; glibc 2.38), {PROGRAM_VARIABLE} is not set"
        )
    return program


@pytest.mark.parametrize("command", of_kind(PERF_ANALYZER))
def test_perf_analyzer(command: str, served: Served, perf_analyzer: str, tmp_path: Path) -> None:
    words = shlex.split(served.here(command))
    done = subprocess.run(
        [perf_analyzer, *words[1:], *SHORT_ANALYZER], cwd=tmp_path, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = [line for line in done.stdout.splitlines() if ", throughput: " in line]
    assert summary
    assert all(float(line.split("throughput: ")[1].split()[0]) > 0 for line in summary)
    assert "Failed" not in done.stdout
    if "-f" in words:
        assert (tmp_path / words[words.index("-f") + 1]).read_text().startswith("Concurrency,Inferences/Second")

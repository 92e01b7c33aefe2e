"""Weir and a user's project may have modules of the same names, such as `schemas`, without conflict."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from bus.naming.live_queues import MAX_LIVE_STREAMS
from runtime.readiness import READY_FD
from weir import server_process
from weir.options import broker as broker_options
from weir.own_packages import OWN_PACKAGES

ROOT = Path(__file__).parents[3]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a module of each of our packages' names, which a program there must be able to import."""
    for name in OWN_PACKAGES:
        (tmp_path / f"{name}.py").write_text(f"MINE = {name!r}\n")
    return tmp_path


def run(folder: Path, code: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script in `folder`, as `python script.py` there does."""
    script = folder / "script.py"
    script.write_text(code)
    return subprocess.run(
        [sys.executable, script],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
        timeout=30,
    )


def test_the_names_are_those_of_all_our_packages() -> None:
    here = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert here - {"tests", "docs", "examples", "benchmarks"} == OWN_PACKAGES | {"weir"}


def test_programs_import_the_server_and_client_beside_their_own_modules(project: Path) -> None:
    code = (
        "import sys, schemas, weir, weir.client, weir.pytest_plugin\n"
        "from weir import ErrorCode, InferResult, Server, StartError, WeirError\n"
        "server = Server('models', live_streams=2)\n"
        f"ours = {sorted(OWN_PACKAGES)!r}\n"
        "assert all(__import__(name).MINE == name for name in ours)\n"
    )
    ran = run(project, code)
    assert ran.returncode == 0, ran.stderr


def test_the_command_runs_with_its_own_packages_whatever_the_path_holds(project: Path) -> None:
    command = [sys.executable, "-P", "-m", "weir", "serve", "--help"]
    ran = subprocess.run(
        command, cwd=project, env={**os.environ, "PYTHONPATH": str(project)}, capture_output=True, text=True, timeout=30
    )
    assert ran.returncode == 0, ran.stderr
    assert "--model-repository" in ran.stdout


def test_a_folder_called_weir_does_not_hide_weir(tmp_path: Path) -> None:
    """As one beside a clone of the project does: a folder without `__init__.py` is a namespace package."""
    (tmp_path / "weir" / "docs").mkdir(parents=True)
    ran = run(tmp_path, "import weir; weir.Server", {"PYTHONPATH": str(tmp_path)})
    assert ran.returncode == 0, ran.stderr


def test_the_backend_interface_names_the_module_in_its_way(project: Path) -> None:
    for name in OWN_PACKAGES - {"worker"}:
        (project / f"{name}.py").unlink()
    ran = run(project, "import weir.backend")
    file = project / "worker.py"
    assert f"weir.backend needs Weir's package 'worker', but {file} has the same name: rename it" in ran.stderr


def test_copied_constants_are_those_of_our_packages() -> None:
    assert server_process.READY_FD == READY_FD
    assert broker_options.MAX_LIVE_STREAMS == MAX_LIVE_STREAMS

"""Weir installs one name, so a user's project may have modules such as `schemas`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

NAMES = sorted(path.name for path in (ROOT / "weir").iterdir() if (path / "__init__.py").is_file())


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a module of each of our packages' names, which a program there must be able to import."""
    for name in NAMES:
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


def test_programs_import_all_of_weir_beside_their_own_modules(project: Path) -> None:
    code = (
        "import weir.backend, weir.client, weir.pytest_plugin, weir.testing, weir.worker.main, weir.gateway.main\n"
        f"assert all(__import__(name).MINE == name for name in {NAMES!r})\n"
    )
    ran = run(project, code, {"PYTHONPATH": str(project)})
    assert ran.returncode == 0, ran.stderr


def test_a_folder_called_weir_does_not_hide_weir(tmp_path: Path) -> None:
    """As one beside a clone of the project does: a folder without `__init__.py` is a namespace package."""
    (tmp_path / "weir" / "docs").mkdir(parents=True)
    ran = run(tmp_path, "import weir; weir.Server", {"PYTHONPATH": str(tmp_path)})
    assert ran.returncode == 0, ran.stderr

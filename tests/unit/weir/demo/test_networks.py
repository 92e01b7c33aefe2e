"""The demo works with the networks at hand, and prints how to install the others."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from weir.demo import networks
from weir.demo.networks import MAGIKA, NETWORKS, RAPIDOCR, SILERO, check_extra, install_command, missing_text
from weir.demo.repository import build_demo_repository
from weir.errors import StartError

ROOT = Path(__file__).parents[4]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_model_of_the_sources_belongs_to_one_network() -> None:
    of_networks = [model for network in NETWORKS for model in network.models]
    assert sorted(of_networks) == sorted(folder.name for folder in (ROOT / "weir" / "demo" / "models").iterdir())


def test_requirements_are_those_of_the_project() -> None:
    named = {network.requirement for network in NETWORKS} - {MAGIKA.requirement}
    assert named == set(PROJECT["dependency-groups"]["networks"])
    assert any(line.startswith("magika") for line in PROJECT["project"]["optional-dependencies"]["demo"])


def test_the_repository_has_the_models_of_the_networks_at_hand(tmp_path: Path) -> None:
    build_demo_repository(tmp_path, [MAGIKA, SILERO])
    assert {folder.name for folder in tmp_path.iterdir()} == {*MAGIKA.models, *SILERO.models}
    build_demo_repository(tmp_path, [MAGIKA])  # a package may be uninstalled
    assert {folder.name for folder in tmp_path.iterdir()} == {*MAGIKA.models}
    assert (tmp_path / "magika" / "1" / "model.onnx").stat().st_size > 1_000_000


def test_what_is_missing_is_named_with_a_command_that_pip_understands() -> None:
    assert missing_text(NETWORKS) == ""
    text = missing_text([MAGIKA, SILERO])
    assert "rapidocr-onnxruntime reads the text in a picture" in text
    assert "silero" not in text
    command = text.splitlines()[-1].strip()
    assert command == install_command([RAPIDOCR])
    words = [*shlex.split(command), "--dry-run", "--no-index", "--quiet"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # installed here, so pip has nothing to look for


def test_without_pip_the_command_is_one_of_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "_is_installed", lambda name: name != "pip")
    assert install_command([SILERO]) == f"uv pip install --python {sys.executable} --no-deps 'silero-vad>=6.2'"


def test_without_the_extra_the_command_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check_extra()
    monkeypatch.setattr(networks, "EXTRA_MODULES", ("onnx", "no_such_module", "tritonclient.no_such_module", "no.such"))
    with pytest.raises(StartError, match=r"no_such_module, tritonclient.no_such_module, no.such can't be imported"):
        check_extra()

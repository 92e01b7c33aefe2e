"""The distribution is called weir-serve: `weir` on PyPI is another project, which no text may tell users to install."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

SHOWN = sorted(
    path
    for pattern in ("*.md", "Makefile", "*/*.md", "*/**/*.py", "compose/**/*", "k8s/**/*")
    for path in ROOT.glob(pattern)
    if path.is_file() and path != Path(__file__) and not path.relative_to(ROOT).parts[0].startswith((".", "CHANGELOG"))
)
"""All that a user may read: pages, messages in the code, manifests."""

_EXTRAS = re.compile(r"\bweir(-serve)?\[([a-z,]+)\]")
_INSTALLED = re.compile(r"pip install (?:-\S+ )*'?weir\b(?!-serve)")


def test_its_name_and_its_command() -> None:
    assert PROJECT["name"] == "weir-serve"
    assert set(PROJECT["scripts"]) == {"weir"}


def test_texts_name_extras_that_there_are() -> None:
    named = {path: _EXTRAS.findall(path.read_text(errors="replace")) for path in [*SHOWN, ROOT / "pyproject.toml"]}
    assert {str(path) for path, found in named.items() if any(not serve for serve, _ in found)} == set()
    extras = {extra for found in named.values() for _, extras in found for extra in extras.split(",")}
    assert {"cpu", "gpu", "torch"} <= extras <= PROJECT["optional-dependencies"].keys()


def test_no_text_says_to_install_the_other_project() -> None:
    assert [str(path) for path in SHOWN if _INSTALLED.search(path.read_text(errors="replace"))] == []

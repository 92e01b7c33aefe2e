"""The documentation agrees with the code and with itself."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from demo_serving import environment
from pages import PAGES, ROOT


def test_generated_parts_are_those_of_today() -> None:
    done = subprocess.run([sys.executable, "-m", "docs.generate", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_stale_part_is_noticed(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__")))
    page = copy / "serving.md"
    page.write_text(page.read_text().replace("`--http-port`", "`--html-port`"))
    done = subprocess.run(
        [sys.executable, "-m", "docs.generate", "--check"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "serving.md" in done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    assert [target for target in targets if not (folder / target).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_code_it_names_exists(page: str) -> None:
    """`folder/file.py` in backquotes, relative to the checkout."""
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", (ROOT / page).read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []

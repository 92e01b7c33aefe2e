"""The documentation is consistent with the code and with itself."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.docs.pages import PAGES, ROOT
from tests.support.servers.demo import environment


def test_generated_parts_are_those_of_today() -> None:
    done = subprocess.run([sys.executable, "-m", "docs.generate", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_stale_part_is_noticed(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__")))
    page = copy / "reference" / "options.md"
    page.write_text(page.read_text().replace("`--http-port`", "`--html-port`"))
    done = subprocess.run(
        [sys.executable, "-m", "docs.generate", "--check"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "reference/options.md" in done.stderr


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


@pytest.mark.parametrize(
    "page", [page for page in PAGES if re.match(r"docs/(internals|reference|architecture|find)", page)]
)
def test_classes_and_functions_it_names_exist(page: str, source_text: str) -> None:
    """`ClassName`, `ClassName.method`, and names in capitals, in backquotes."""
    named = re.findall(r"`([A-Z]\w*[a-z]\w*[A-Z]\w*(?:\.\w+)?|[A-Z]+(?:_[A-Z]+)+)`", (ROOT / page).read_text())
    assert [name for name in named if not all(part in source_text for part in name.split("."))] == []


@pytest.fixture(scope="session")
def source_text() -> str:
    """The text of the source tree, deployment files and tests."""
    paths = [
        path
        for folder in ("weir", "gateway", "scheduler", "worker", "schemas", "k8s", "compose", "tests")
        for path in (ROOT / folder).rglob("*.*")
    ]
    return "\n".join(path.read_text() for path in paths if path.suffix in (".py", ".yaml", ".yml"))


def test_what_is_pushed_are_models() -> None:
    """A folder of models is no model: each of them is to be pushed."""
    pushed = [
        folder
        for page in PAGES
        for command in re.findall(r"weir push ([^\n`]*)", (ROOT / page).read_text())
        for folder in command.split()
        if folder.startswith(".weir/demo/models")
    ]
    models = {path.name for path in (ROOT / "weir" / "demo" / "models").iterdir()}
    assert pushed
    assert [folder for folder in pushed if Path(folder).name not in models | {"*"}] == []

"""The documentation site builds without a warning, and its home page is the README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.docs.pages import PAGES, ROOT

MAX_GLOSSARY_TERMS = 25


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A link or an anchor that leads nowhere, or a page outside of the navigation, fails the build."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_home_page_is_the_readme(site: Path) -> None:
    assert "Two commands" in (site / "index.html").read_text()


def test_every_page_is_in_the_search_index(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text()
    pages = [page.removeprefix("docs/").removesuffix(".md") for page in PAGES if page.startswith("docs/")]
    assert [page for page in pages if f'"{page}/"' not in index] == []


def test_the_python_reference_describes_the_public_classes(site: Path) -> None:
    text = (site / "reference" / "python-api" / "index.html").read_text()
    assert all(f'id="{name}"' in text for name in ("weir.server.Server", "weir.errors.StartError", "weir.backend"))


def test_the_site_requests_nothing_of_other_hosts(site: Path) -> None:
    loaded = re.findall(
        r'<(?:script|link rel="stylesheet")[^>]+(?:src|href)="(https?://[^"]+)"', (site / "index.html").read_text()
    )
    assert loaded == []


def test_the_glossary_is_short_and_its_terms_are_used() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    terms = re.findall(r"^\| ([a-z ]+) \|", text, re.MULTILINE)[1:]
    assert len(terms) <= MAX_GLOSSARY_TERMS
    assert terms == sorted(terms)
    pages = [(ROOT / page).read_text().lower() for page in PAGES if page != "docs/glossary.md"]
    assert [term for term in terms if not any(term in page for page in pages)] == []


def test_the_overview_is_short() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) <= 250

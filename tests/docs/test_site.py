"""The documentation site builds without a warning, looks like the console, and asks no other host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.clients.browser import chromium, page, page_problems
from tests.support.docs.pages import PAGES, ROOT

__all__ = ["chromium", "page", "page_problems"]

expect = pytest.importorskip("playwright.sync_api").expect

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


def test_no_page_refers_to_another_host_but_by_a_link(site: Path) -> None:
    files = sorted(site.rglob("*.html"))
    assert len(files) > len(PAGES) / 2
    for file in files:
        text = file.read_text()
        tags = re.findall(r"<(?!a\b)\w[^>]*>", text)
        assert [
            tag for tag in tags if re.search(r"""\b(?:src|href|srcset|poster|data|action)=["']?(?:https?:)?//""", tag)
        ] == [], file
        # What the theme's script asks other hosts for: a repository's stars, and a library for such diagrams.
        assert 'data-md-component="source"' not in text, file
        assert 'class="mermaid"' not in text, file


def test_no_style_refers_to_another_host(site: Path) -> None:
    styles = sorted(site.rglob("*.css"))
    assert [
        style.name for style in styles if re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text())
    ] == []
    assert {"colours.css", "site.css"} <= {style.name for style in styles}


def test_a_browser_that_reads_and_searches_asks_no_other_host(site: Path, page: Any) -> None:
    asked: set[str] = set()
    page.on("request", lambda request: asked.add(urlsplit(request.url).netloc))
    with served_folder(site) as place:
        for path in ("", "first-hour/", "reference/python-api/"):
            page.goto(f"http://{place}/{path}")
            page.wait_for_load_state("networkidle")
        search = page.get_by_role("textbox", name="Search")
        search.click()
        search.press_sequentially("durable")
        expect(page.locator(".md-search-result__item").first).to_be_attached()
    assert asked - {""} == {place}


@pytest.mark.parametrize(("scheme", "bar"), [("light", "--accent"), ("dark", "--panel")])
def test_the_site_has_the_logo_and_the_colours_of_the_console(site: Path, page: Any, scheme: str, bar: str) -> None:
    web = ROOT / "weir" / "console" / "web"
    assert (site / "assets" / "weir.svg").read_text() == (web / "weir.svg").read_text()
    light, dark = (web / "styles" / "colours.css").read_text().split(':root[data-theme="dark"]')
    style = light if scheme == "light" else dark
    page.emulate_media(color_scheme=scheme)
    with served_folder(site) as place:
        page.goto(f"http://{place}/")
        assert page.locator(".md-header .md-logo img").get_attribute("src") == "assets/weir.svg"
        expect(page.locator(".md-header")).to_have_css("background-color", colour(bar, style))
        expect(page.locator("body")).to_have_css("background-color", colour("--ground", style))


def colour(name: str, style: str) -> str:
    """The value of a variable in a style, as a browser computes it."""
    found = re.search(rf"{name}: #(\w{{6}});", style)
    assert found
    return f"rgb({', '.join(map(str, bytes.fromhex(found[1])))})"


@contextmanager
def served_folder(folder: Path) -> Iterator[str]:
    """Serves a folder on a free port of this machine; yields host and port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class QuietHandler(SimpleHTTPRequestHandler):
    """Logs nothing."""

    def log_message(self, *_arguments: object) -> None:
        """Drops the line."""


def test_the_glossary_is_short_and_its_terms_are_used() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    terms = re.findall(r"^\| ([a-z ]+) \|", text, re.MULTILINE)[1:]
    assert len(terms) <= MAX_GLOSSARY_TERMS
    assert terms == sorted(terms)
    pages = [(ROOT / page).read_text().lower() for page in PAGES if page != "docs/glossary.md"]
    assert [term for term in terms if not any(term in page for page in pages)] == []


def test_the_overview_is_short() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) <= 250

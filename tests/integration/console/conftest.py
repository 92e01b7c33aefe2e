"""Fixtures of the console's tests: a browser, and the page with a large simulated cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.clients.browser import chromium, page, page_problems
from tests.support.console.large_cluster import LargeCluster
from tests.support.console.page_server import PageServer, serving_page
from weir.console.npm.copy_files import CONSOLE, ROOT

__all__ = ["chromium", "page", "page_problems"]


@pytest.fixture(autouse=True)
def _built() -> None:
    if not (ROOT / CONSOLE / "preact.mjs").exists():
        pytest.skip("the libraries of the page are missing: make install")


@pytest.fixture
def large() -> Iterator[PageServer]:
    """The page, with the answers of a simulated cluster of 200 models on 50 workers."""
    with serving_page(LargeCluster()) as pages:
        yield pages

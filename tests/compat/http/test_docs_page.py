"""The page `/docs` in a browser: it shows the loaded models, and runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.clients.browser import chromium, page, page_problems, save_picture
from tests.support.models import zoo
from tests.support.models.http import serving
from tests.support.servers.weir_server import Server
from weir.gateway.http.openapi.docs_page import VENDOR

__all__ = ["chromium", "page", "page_problems"]

pytestmark = pytest.mark.skipif(not VENDOR.is_dir(), reason="the files of the page are not built: run `make install`")


def write_models(root: Path) -> None:
    zoo.write_add_sub(root)
    zoo.write_classes(root)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("docs"), write_models) as started:
        yield started


@pytest.fixture
def docs(page: Any, server: Server) -> Any:
    """The page, after it has shown the operations."""
    page.goto(f"http://{server.http_place}/docs")
    page.locator(".opblock").first.wait_for()
    return page


def operation(docs: Any, path: str) -> Any:
    """The block of an operation, unfolded."""
    block = docs.locator(".opblock", has=docs.locator(f'[data-path="{path}"]'))
    block.locator(".opblock-summary-control").click()
    return block


def test_it_lists_the_operations_of_the_loaded_models(docs: Any, server: Server, tmp_path: Path) -> None:
    document = httpx.get(f"http://{server.http_place}/openapi.json").json()
    shown = {element.get_attribute("data-path") for element in docs.locator("[data-path]").all()}
    assert shown == set(document["paths"])
    assert {"/v2/models/add_sub/infer", "/v2/models/classes/generate"} <= shown
    assert save_picture(docs, "api-docs.png", tmp_path).stat().st_size < 200_000


def test_an_example_can_be_tried(docs: Any) -> None:
    block = operation(docs, "/v2/models/add_sub/infer")
    block.get_by_role("button", name="Try it out").click()
    block.get_by_role("button", name="Execute").click()
    response = block.locator(".live-responses-table .response")
    response.wait_for()
    assert response.locator(".response-col_status").inner_text().startswith("200")
    text = response.locator(".microlight, pre").first.inner_text()
    assert '"SUM"' in text
    assert '"model_name": "add_sub"' in text

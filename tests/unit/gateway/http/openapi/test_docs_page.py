"""The files of the page `/docs`: how they are served, and what is answered where they are missing."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.access.doors import application
from weir.gateway.http.openapi.docs_page import FILES, NOT_BUILT, VENDOR, docs_routes

PATHS = {file: "/docs" if file.endswith(".html") else f"/docs/{Path(file).name}" for file in FILES}


def client(folder: Path) -> httpx.AsyncClient:
    app = application(docs_routes(folder))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weir")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with all files, each with its name as content."""
    for file in FILES:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(file)
    return tmp_path


@pytest.mark.parametrize("file", FILES)
async def test_each_file_is_served(folder: Path, file: str) -> None:
    page = client(folder)
    response = await page.get(PATHS[file])
    assert (response.status_code, response.text) == (200, file)
    assert response.headers["content-type"] == FILES[file]
    assert response.headers["x-content-type-options"] == "nosniff"
    again = await page.get(PATHS[file], headers={"If-None-Match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_scripts_and_styles_come_from_the_server_alone(folder: Path) -> None:
    policy = (await client(folder).get("/docs")).headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["frame-ancestors"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    index = (VENDOR.parent / "page/index.html").read_text()
    assert "://" not in index
    assert index.count("<script") == index.count("<script src=")


async def test_files_are_read_once(folder: Path) -> None:
    page = client(folder)
    first = (await page.get("/docs")).text
    for file in FILES:
        (folder / file).unlink()
    assert (await page.get("/docs")).text == first


@pytest.mark.parametrize("missing", FILES)
async def test_an_installation_without_the_files_says_how_to_get_them(folder: Path, missing: str) -> None:
    content = (folder / missing).read_text()
    (folder / missing).unlink()
    page = client(folder)
    for path in PATHS.values():
        response = await page.get(path)
        assert (response.status_code, response.json()) == (404, {"error": NOT_BUILT})
    (folder / missing).write_text(content)
    assert (await page.get("/docs")).status_code == 200


@pytest.mark.parametrize("path", ["/docs/index.html", "/docs/../openapi.py", "/docs/vendor/swagger-ui.css", "/docs/x"])
async def test_there_are_no_other_files(folder: Path, path: str) -> None:
    assert (await client(folder).get(path)).status_code == 404

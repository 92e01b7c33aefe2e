"""The fixtures for tests of web pages report what goes wrong in a page."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.browser import HEIGHT, WIDTH, chromium, page, page_problems, save_screenshot

__all__ = ["chromium", "page", "page_problems"]


@pytest.mark.parametrize(
    ("script", "reported"),
    [
        ("console.error('lost')", "error: lost"),
        ("console.warn('late')", "warning: late"),
        ("setTimeout(() => { throw new Error('broken') })", "exception: broken"),
        ("fetch('http://127.0.0.1:1/').catch(() => 0)", "failed: http://127.0.0.1:1/"),
    ],
)
def test_problems_of_a_page_are_reported(page: Any, page_problems: list[str], script: str, reported: str) -> None:
    page.evaluate(f"() => {{ {script} }}")
    for _ in range(500):
        if any(reported in problem for problem in page_problems):
            break
        page.wait_for_timeout(20)  # Playwright delivers events while it waits
    assert any(reported in problem for problem in page_problems)
    page_problems.clear()


def test_screenshots_have_one_size(page: Any, tmp_path: Path) -> None:
    page.set_content("<h1>Weir</h1>")
    pictures = []
    for name in ("first.png", "second.png"):
        save_screenshot(page, tmp_path / name)
        pictures.append((tmp_path / name).read_bytes())
    assert pictures[0] == pictures[1]
    assert [int.from_bytes(pictures[0][place : place + 4], "big") for place in (16, 20)] == [WIDTH, HEIGHT]

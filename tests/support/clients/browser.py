"""Fixtures for tests of web pages in a headless Chromium: `chromium`, `page` and `page_problems`.

Import the three into a test module. The tests are skipped where no Chromium is installed. Playwright drives the browser;
it only comes with a driver, so the browser is that of the system (`apt-get install chromium`).

Playwright's synchronous interface runs an event loop in the thread of the tests until `chromium` ends, so a module with
these fixtures has no `async` tests.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""The commands that start a Chromium, by distribution."""

WIDTH, HEIGHT = 1280, 800
"""Pixels of the window, and of a screenshot of it."""

TIMEOUT_MS = 20_000
"""A guard against a hang, for what a test does and for what it expects. A busy machine shows some values after 5 s."""

PICTURES = Path(__file__).parents[3] / "docs" / "pictures"

_ARGUMENTS = (
    "--disable-gpu",
    "--disable-lcd-text",
    "--font-render-hinting=none",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
)
"""The same pixels on each machine that has the same fonts."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A running browser."""
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def page_problems() -> list[str]:
    """What `page` has reported so far: errors and warnings of its console, exceptions, and requests that failed.

    A test that expects some removes them; the others fail the test at its end.
    """
    return []


@pytest.fixture
def page(chromium: Browser, page_problems: list[str]) -> Iterator[Page]:
    """A blank page of a new profile, in light colours. The test fails if the page reports a problem."""
    context = chromium.new_context(
        viewport={"width": WIDTH, "height": HEIGHT},
        device_scale_factor=1,
        color_scheme="light",
        reduced_motion="reduce",
        locale="en-GB",
        timezone_id="UTC",
    )
    context.set_default_timeout(TIMEOUT_MS)
    try:
        made = context.new_page()
        watch(made, page_problems)
        yield made
        assert page_problems == []
    finally:
        context.close()


def watch(page: Page, problems: list[str]) -> None:
    """Adds what the page reports to `problems`. Call it for each further page that a test opens.

    A request that the page itself ends, as a stream of events when it is left, is no problem.
    """

    def on_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            problems.append(f"{message.type}: {message.text}")

    def on_failure(request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":
            problems.append(f"failed: {request.url} ({request.failure})")

    page.on("console", on_console)
    page.on("pageerror", lambda error: problems.append(f"exception: {error}"))
    page.on("requestfailed", on_failure)


def save_screenshot(page: Page, path: Path) -> None:
    """Writes the window as a PNG of `WIDTH` times `HEIGHT` pixels, without animations and the text cursor."""
    page.screenshot(path=path, animations="disabled", caret="hide", scale="css")


def save_picture(page: Page, name: str, folder: Path) -> Path:
    """Writes a picture of the documentation, `docs/pictures/<name>`, if WEIR_SAVE_PICTURES is set.

    Otherwise it goes into `folder`: a test run changes no file of the source tree, and other fonts give other pixels.
    """
    path = (PICTURES if os.environ.get("WEIR_SAVE_PICTURES") else folder) / name
    save_screenshot(page, path)
    return path

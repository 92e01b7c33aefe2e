"""What tests do on the console's page."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.clients.browser import save_picture

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

VIEWS = {
    "overview": "Overview",
    "topology": "Topology",
    "models": "Models",
    "try": "Try it",
    "batching": "Batching",
    "requests": "Requests",
    "jobs": "Jobs",
    "dead": "Dead letters",
}
"""The views by the first segment of their routes, with their titles."""


def open_view(page: Page, route: str) -> None:
    """Goes to a route, as `models/classes?tab=history`."""
    page.evaluate("route => { location.hash = `#/${route}`; }", route)


def figure(page: Page, label: str) -> Locator:
    """The number that is shown under a label."""
    return page.locator(".figure", has_text=label).locator(".figure-value")


def cell(page: Page, row: str, column: str) -> Locator:
    """A cell of the table of the view, in the first row with this text; `column` is the field of the data."""
    return page.locator(".tabulator-row", has_text=row).first.locator(f'[tabulator-field="{column}"]')


def picture(page: Page, name: str) -> None:
    """Takes a picture of the documentation; it is kept with WEIR_SAVE_PICTURES (`make pictures`)."""
    page.mouse.move(0, 0)
    with tempfile.TemporaryDirectory() as folder:
        save_picture(page, f"{name}.png", Path(folder))

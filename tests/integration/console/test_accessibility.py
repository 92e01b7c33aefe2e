"""Each view of the console, in light and dark colours and on a phone, as axe-core sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest

from tests.support.clients.accessibility import grave_barriers, needs_axe
from tests.support.clients.browser import HEIGHT, WIDTH
from tests.support.console.large_cluster import FAILED_JOB, HOSTILE, SPLIT, TRACE
from tests.support.console.page_server import PageServer
from tests.support.console.views import open_view

expect = pytest.importorskip("playwright.sync_api").expect

NAME = quote(HOSTILE, safe="")


class View(NamedTuple):
    """A route, what is there once it is drawn, and what is done then."""

    route: str
    drawn: str
    act: Callable[[Any], None] = lambda page: None


def opened(button: str, shown: str) -> Callable[[Any], None]:
    """Presses a button, and waits for what it opens."""

    def act(page: Any) -> None:
        page.get_by_role("button", name=button, exact=True).first.click()
        expect(page.locator(shown).first).to_be_visible()

    return act


def pressed(key: str, shown: str) -> Callable[[Any], None]:
    """Presses a key, and waits for what it opens."""

    def act(page: Any) -> None:
        page.keyboard.press(key)
        expect(page.locator(shown).first).to_be_visible()

    return act


def unfolded(page: Any) -> None:
    """Opens the problems that are in one line."""
    page.locator(".problem summary").click()
    expect(page.locator(".problem details li").first).to_be_visible()


ROW = ".tabulator-row"

VIEWS = {
    "overview": View("overview", ROW),
    "topology": View("topology", ROW, unfolded),
    "queues": View("topology", ROW, lambda page: page.get_by_role("tab", name="Queues").click()),
    "process": View("topology?process=worker-00000000-00000000", ".panel .facts"),
    "models": View("models", ROW),
    "no model": View("models?q=nothing", ".tabulator-placeholder"),
    "model": View(f"models/{NAME}", ".line-chart canvas"),
    "traffic": View(f"models/{SPLIT}", ".traffic fieldset"),
    "configuration": View(f"models/{NAME}?tab=configuration", ".configuration"),
    "statistics": View(f"models/{NAME}?tab=statistics", ".statistics table"),
    "history": View(f"models/{NAME}?tab=history", ".plain-table td"),
    "roll back": View(f"models/{NAME}?tab=history", ".plain-table td", opened("Roll back", "dialog .dialog-buttons")),
    "gallery": View("try", ".names.large a"),
    "form": View("try/model-007", ".copies pre"),
    "answer": View("try/model-007", ".copies pre", opened("Send request", ".response .duration")),
    "batching": View("batching/model-001", ".explanation p"),
    "requests": View("requests", ROW),
    "request": View("requests/request-2", ".waterfall canvas"),
    "unknown request": View("requests/unknown-1", ".panel"),
    "jobs": View("jobs", ROW),
    "job": View("jobs/batch-0123456789abcdef", ".panel .progress"),
    "failed job": View(f"jobs/{FAILED_JOB}", ".panel .progress"),
    "submit": View("jobs", ROW, opened("Submit a job", ".drop")),
    "dead letters": View("dead", ROW),
    "letter": View("dead/4", ".panel pre"),
    "keys": View("overview", ROW, pressed("?", "dialog .keys")),
    "finder": View("overview", ROW, pressed("/", "dialog [role=option]")),
}
"""All views, and the dialogs."""

SCREENS = {"light": ("light", WIDTH), "dark": ("dark", WIDTH), "phone": ("light", 360)}
"""Colours and the width of the window."""


@needs_axe
@pytest.mark.timeout(300)
@pytest.mark.parametrize("screen", SCREENS)
def test_no_view_keeps_anybody_out(page: Any, large: PageServer, screen: str) -> None:
    colours, width = SCREENS[screen]
    large.allow_changes = True
    large.cluster.without_worker = [f"model-{number:03}" for number in range(20, 29)]
    large.cluster.failing["model-003"] = TRACE
    page.emulate_media(color_scheme=colours)
    page.set_viewport_size({"width": width, "height": HEIGHT})
    page.goto(large.url)
    barriers = {}
    for name, view in VIEWS.items():
        open_view(page, "nothing")  # so that nothing of the view before is taken for this one
        open_view(page, view.route)
        expect(page.locator(view.drawn).first).to_be_visible()
        view.act(page)
        barriers[name] = grave_barriers(page)
        page.keyboard.press("Escape")
        expect(page.locator("dialog")).to_have_count(0)
    assert {name: found for name, found in barriers.items() if found} == {}


@needs_axe
def test_what_is_wrong_keeps_nobody_out(page: Any, large: PageServer) -> None:
    large.cluster.has_gateway = False
    page.goto(large.url)
    expect(page.get_by_role("alert").first).to_be_visible()
    assert grave_barriers(page) == {}
    open_view(page, "try/model-007")
    expect(page.get_by_role("alert").nth(1)).to_be_visible()
    assert grave_barriers(page) == {}

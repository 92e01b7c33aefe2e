"""How the console's page shows what is wrong, with the answers of a simulated cluster."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.console.large_cluster import FAILED_JOB, SPLIT, TRACE
from tests.support.console.page_server import PageServer
from tests.support.console.views import cell, figure, open_view

expect = pytest.importorskip("playwright.sync_api").expect

UNKNOWN = "–"


@pytest.fixture
def console(large: PageServer, page: Any) -> Any:
    """The page of a console that may change things, at its overview."""
    large.allow_changes = True
    page.goto(large.url)
    expect(page.locator(".figure-value").first).to_contain_text("/s")
    return page


def test_without_a_gateway_numbers_of_requests_are_unknown(console: Any, large: PageServer) -> None:
    open_view(console, "try/model-007")
    expect(console.get_by_role("button", name="Send request")).not_to_have_attribute("aria-disabled", "true")
    large.cluster.has_gateway = False
    expect(console.get_by_role("alert")).to_contain_text("No gateway replies: clients can't connect.")
    send = console.get_by_role("button", name="Send request")
    expect(send).to_have_attribute("aria-disabled", "true")
    expect(console.get_by_text("No gateway replies: no request can be sent until one does.")).to_be_visible()
    send.click(force=True)
    assert large.actions == []
    for route, row in (("overview", None), ("models/model-007", None), ("models", "model-007")):
        open_view(console, route)
        if row is None:
            expect(figure(console, "Requests")).to_have_text(UNKNOWN)
            expect(figure(console, "p99")).to_have_text(UNKNOWN)
            expect(figure(console, "Waiting")).not_to_have_text(UNKNOWN)
        else:
            expect(cell(console, row, "requests_per_s")).to_have_text(UNKNOWN)
            expect(cell(console, row, "p99_ms")).to_have_text(UNKNOWN)
        expect(console.locator(".banner")).to_contain_text("No gateway replies")
    open_view(console, f"models/{SPLIT}")
    expect(console.get_by_text("How the requests are split is unknown: a gateway has the rule.")).to_be_visible()
    expect(console.get_by_role("button", name="Unload")).to_have_attribute("title", "No gateway replies.")
    open_view(console, "try/model-008")
    expect(console.get_by_text("No gateway replies: no request can be sent until one does.")).to_be_visible()
    large.cluster.has_gateway = True
    expect(console.locator(".banner")).to_have_count(0)
    expect(console.get_by_role("button", name="Send request")).to_be_visible()


def test_alike_problems_are_one_line_that_opens(console: Any, large: PageServer) -> None:
    large.cluster.without_worker = [f"model-{number:03}" for number in range(20, 29)]
    line = console.locator(".problem", has_text="9 models have no worker: model-020, model-021, model-022 and 6 more.")
    expect(line).to_be_visible()
    expect(console.locator(".problem")).to_have_count(2)  # it, and the model that fails
    expect(console.get_by_text("Model 'model-028' has no worker")).not_to_be_visible()
    line.get_by_text("9 problems").click()
    expect(console.get_by_text("Model 'model-028' has no worker: 1 request waits.")).to_be_visible()


def test_dead_letters_are_a_note_that_leads_to_them(console: Any, large: PageServer) -> None:
    large.cluster.failing.clear()
    large.cluster.dead_letters = 3
    expect(console.locator(".summary .state")).to_have_text("healthy")
    expect(console.locator(".problem")).to_have_count(0)
    expect(console.get_by_role("link", name="Topology").locator("em")).to_have_count(0)
    open_view(console, "topology")
    note = console.locator(".problem.note", has_text="3 dead letters of 'model-001'.")
    expect(note.locator("code")).to_have_count(0)
    note.get_by_role("link", name="Look into them, replay or delete them").click()
    expect(console.get_by_role("heading", name="Dead letters")).to_be_visible()
    expect(console.get_by_label("Model", exact=True).first).to_have_value("model-001")


def test_a_traceback_is_preformatted(console: Any, large: PageServer) -> None:
    first, _, trace = TRACE.partition("\n")
    large.cluster.failing = {"model-003": TRACE}
    problem = console.locator(".problem.warning")
    expect(problem.locator("b")).to_have_text(f"Model 'model-003' fails: {first}.")
    expect(problem.locator("pre")).to_have_text(trace.strip())
    problem.get_by_role("link", name="Open the model").click()
    expect(console.get_by_role("heading", name="model-003")).to_be_visible()
    expect(console.locator(".failure pre")).to_have_text(trace.strip())
    open_view(console, "models")
    reason = cell(console, "model-003", "reason").locator("span")
    expect(reason).to_have_text(first)
    expect(reason).to_have_attribute("title", TRACE)


def test_a_job_in_which_items_failed_is_not_green(console: Any) -> None:
    open_view(console, f"jobs/{FAILED_JOB}")
    panel = console.get_by_label(f"Job {FAILED_JOB}")
    for state in (
        panel.locator(".state"),
        cell(console, FAILED_JOB.removeprefix("batch-"), "outcome").locator(".state"),
    ):
        expect(state).to_have_class("state bad")
        expect(state).to_have_text("done, 4 of 5 failed")
    # A few of 1 000 so far.
    expect(cell(console, "0123456789abcdef", "outcome").locator(".state")).to_have_class("state warn")


def test_names_and_reasons_get_the_room_that_numbers_leave(large: PageServer, page: Any) -> None:
    name = "recogniser_of_numbers_2026_int8"
    reason = "Internal: the file of version 1 is missing"
    large.cluster.models[1] = name
    large.cluster.failing = {name: reason}
    page.goto(f"{large.url}#/models?show=failing")
    for column, text in (("name", name), ("reason", reason)):
        shown = cell(page, name, column)
        expect(shown).to_have_text(text)
        assert shown.evaluate("cell => cell.scrollWidth <= cell.clientWidth"), f"{column} is cut"

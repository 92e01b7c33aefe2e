"""What the page of a model does, with the answers of a simulated cluster: loads, ramps, copies, rollback."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.console.large_cluster import SPLIT
from tests.support.console.page_server import PageServer
from tests.support.console.views import open_view

expect = pytest.importorskip("playwright.sync_api").expect


@pytest.fixture
def console(large: PageServer, page: Any) -> Any:
    """The page of a console that may change things."""
    large.allow_changes = True
    page.goto(large.url)
    expect(page.get_by_text("Changes allowed")).to_be_visible()
    return page


MODES = [
    ("none", "the workers load all models of the repository when they start (--model-control-mode=none)"),
    ("poll", "the workers follow the files of the repository (--model-control-mode=poll)"),
]


@pytest.mark.parametrize(("mode", "sentence"), MODES)
def test_in_other_modes_than_explicit_models_are_not_loaded_from_here(
    console: Any, large: PageServer, mode: str, sentence: str
) -> None:
    large.cluster.control_mode = mode
    open_view(console, "models/model-007")
    expect(console.get_by_text(sentence)).to_be_visible()
    for name in ("Reload", "Unload"):
        button = console.get_by_role("button", name=name, exact=True)
        expect(button).to_have_attribute("aria-disabled", "true")
        expect(button).to_have_attribute("title", console.locator(".note", has_text=sentence).inner_text())
        button.click(force=True)
    expect(console.get_by_role("dialog")).to_have_count(0)
    assert large.actions == []
    large.cluster.unloaded = {"model-008"}
    open_view(console, "try/model-008")
    expect(console.get_by_text("No worker serves the model.")).to_be_visible()
    expect(console.get_by_role("link", name="Load it")).to_have_count(0)
    large.cluster.control_mode = "explicit"
    expect(console.get_by_role("link", name="Load it")).to_be_visible()
    open_view(console, "models/model-007")
    expect(console.get_by_text(sentence)).to_have_count(0)
    console.get_by_role("button", name="Reload").click()
    expect(console.get_by_text("Model model-007 is loaded again")).to_be_visible()


def test_a_ramp_and_copies_are_started_and_stopped(console: Any, large: PageServer) -> None:
    open_view(console, f"models/{SPLIT}")
    ramp = console.get_by_role("group", name="Ramp")
    expect(ramp).to_contain_text("Version 2 to 100 % over 30 min: aborted, step 3 of 9")
    expect(ramp).to_contain_text("12 of 40 requests failed")
    ramp.get_by_label("Goal in percent").fill("40")
    ramp.get_by_label("Time in minutes").fill("2.5")
    ramp.get_by_label("Go back if").fill("p99>1.5x")
    ramp.get_by_role("button", name="Start the ramp").click()
    expect(console.get_by_text(f"The share of version 2 of {SPLIT} is being raised to 40 %")).to_be_visible()
    copies = console.get_by_role("group", name="Copies of live requests")
    expect(copies).to_contain_text("20 % are copied to version 2, and the outputs are compared")
    copies.get_by_label("Version").select_option("1")
    copies.get_by_label("Share in percent").fill("5")
    copies.get_by_label("compare the outputs").uncheck()
    copies.get_by_role("button", name="Run copies").click()
    expect(console.get_by_text("Copies of 5 % of the requests")).to_be_visible()
    copies.get_by_role("button", name="Stop copies").click()
    expect(console.get_by_text(f"No copies of requests of {SPLIT} run")).to_be_visible()
    path = f"/api/models/{SPLIT}/traffic"
    sent = [(method, place, json.loads(body) if body else None) for method, place, body in large.actions]
    assert sent == [
        ("POST", f"{path}/ramp", {"version": 2, "to": 40, "over_s": 150, "abort_if": "p99>1.5x"}),
        ("PUT", f"{path}/shadow", {"version": 1, "share": 5, "compare": False}),
        ("DELETE", f"{path}/shadow", None),
    ]


def test_what_a_ramp_lacks_is_said(console: Any, large: PageServer) -> None:
    open_view(console, f"models/{SPLIT}")
    ramp = console.get_by_role("group", name="Ramp")
    ramp.get_by_label("Goal in percent").fill("0")
    start = ramp.get_by_role("button", name="Start the ramp")
    expect(start).to_have_attribute("aria-disabled", "true")
    expect(ramp.get_by_text("Give a goal from 1 to 100 % and a time.")).to_be_visible()
    large.allow_changes = False
    console.reload()
    expect(start).to_have_attribute("title", "The console is read-only: start the server with --console-allow-changes "
                                             "to change things from here.")  # fmt: skip


def test_the_last_change_is_rolled_back_once_it_is_confirmed(console: Any, large: PageServer) -> None:
    open_view(console, f"models/{SPLIT}?tab=history")
    console.get_by_role("button", name="Roll back").click()
    console.get_by_role("dialog").get_by_role("button", name="Keep").click()
    assert large.actions == []
    console.get_by_role("button", name="Roll back").click()
    console.get_by_role("dialog").get_by_role("button", name="Roll back").click()
    expect(console.get_by_role("status").get_by_text("Now: 1=100")).to_be_visible()
    assert large.actions == [("POST", f"/api/models/{SPLIT}/rollback", "")]

"""The console's page on a real server: what it says to copy, what a gateway does for it, and what it shows without one."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.clients.accessibility import grave_barriers, needs_axe
from tests.support.console.console_server import ConsoleServer
from tests.support.console.views import cell, figure, open_view
from tests.support.models.zoo import write_classes, write_python_model, write_streamer, write_versions
from tests.support.waiting import wait_until

expect = pytest.importorskip("playwright.sync_api").expect

BROKEN = "the weights are nowhere to be found"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    """A server with a decoupled model, one that can't be loaded, and one with versions."""
    folder = tmp_path_factory.mktemp("gateways")
    models = folder / "models"
    models.mkdir()
    write_classes(models)
    write_streamer(models, "streamer", "")
    write_versions(models, "versions", "version_policy { all { } }")
    write_python_model(models, "broken", "unloadable", {"IN": ("FP32", [1])}, {"OUT": ("FP32", [1])})
    started = ConsoleServer(folder, models)
    try:
        yield started
        assert started.stop() == 0
    finally:
        started.close()


@pytest.fixture
def console(server: ConsoleServer, page: Any) -> Any:
    """The page of that server, at its overview."""
    page.goto(server.console_url)
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    return page


def copied(console: Any, language: str) -> str:
    """The request to copy in a language."""
    console.get_by_role("tab", name=language, exact=True).click()
    return str(console.locator(".copies pre").inner_text())


def test_the_requests_to_a_decoupled_model_get_all_its_responses(console: Any, server: ConsoleServer) -> None:
    open_view(console, "try/streamer")
    console.get_by_label("Content of PLAN").last.fill(json.dumps({"responses": 3, "size": 2}))
    shell = copied(console, "curl")
    assert "/v2/models/streamer/generate_stream" in shell
    events = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout
    numbers = [json.loads(line.removeprefix("data: "))["NUMBER"] for line in events.splitlines() if line]
    assert numbers == [0, 1, 2]
    program = copied(console, "Python")
    assert "tritonclient.grpc" in program
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"NUMBER \[\[(\d)\]\]", printed) == ["0", "1", "2"]
    assert "nats request --replies=0" in copied(console, "nats")
    console.get_by_role("button", name="Send request").click()
    expect(console.locator(".response .output")).to_have_count(6)


def test_the_nats_request_reads_the_server_s_own_password(console: Any, server: ConsoleServer) -> None:
    open_view(console, "try/classes")
    line = copied(console, "nats").splitlines()[0]
    asked = f'{line}; printf %s "$NATS_URL"'
    url = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True).stdout
    assert url == server.nats_url


def test_a_model_that_can_t_be_loaded_has_its_reason_where_it_would_be_tried(
    console: Any, page_problems: list[str]
) -> None:
    open_view(console, "try/broken")
    expect(console.get_by_role("alert")).to_contain_text(BROKEN)
    expect(console.get_by_text("Load it")).to_have_count(0)
    open_view(console, "models/broken")
    expect(console.locator(".failure").first).to_contain_text(BROKEN)


def test_a_ramp_copies_and_a_rollback_of_a_real_model(console: Any, server: ConsoleServer) -> None:
    def traffic() -> Any:
        return server.api("GET", "/v2/models/versions/traffic")

    open_view(console, "models/versions")
    ramp = console.get_by_role("group", name="Ramp")
    expect(ramp.get_by_role("button", name="Start the ramp")).to_have_attribute("aria-disabled", "true")
    console.get_by_label("Version 1").fill("100")
    console.get_by_role("button", name="Set shares").click()
    expect(console.get_by_text("Rule: 1=100")).to_be_visible()
    ramp.get_by_label("Version").select_option("3")
    ramp.get_by_role("button", name="Start the ramp").click()
    expect(ramp).to_contain_text("Version 3 to 100 % over 30 min: running, step 1 of 9")
    assert traffic()["ramp"]["abort_if"] == "error_rate>1% or p99>1.5x"
    copies = console.get_by_role("group", name="Copies of live requests")
    copies.get_by_label("Version").select_option("2")
    copies.get_by_role("button", name="Run copies").click()
    expect(copies).to_contain_text("20 % are copied to version 2, and the outputs are compared")
    assert traffic()["shadow"] == {"version": "2", "share": 20.0, "compare": True}
    copies.get_by_role("button", name="Stop copies").click()
    expect(console.get_by_role("status").get_by_text("No copies of requests of versions run")).to_be_visible()
    assert "shadow" not in traffic()
    console.get_by_role("button", name="Remove the rule").click()
    expect(console.get_by_text("No rule: the latest version gets all.")).to_be_visible()
    console.get_by_role("tab", name="History").click()
    console.get_by_role("button", name="Roll back").click()
    console.get_by_role("dialog").get_by_role("button", name="Roll back").click()
    expect(console.get_by_role("status").get_by_text("Undone: traffic")).to_be_visible()
    assert traffic()["weights"]
    server.api("DELETE", "/v2/models/versions/traffic")


@needs_axe
def test_the_pages_of_a_real_server_keep_nobody_out(console: Any, server: ConsoleServer) -> None:
    server.classify()
    views = {
        "overview": ".tabulator-row",
        "topology": ".tabulator-row",
        "models": ".tabulator-row",
        "models/versions": ".traffic fieldset",
        "models/broken": ".failure",
        "models/classes?tab=statistics": ".statistics table",
        "models/classes?tab=configuration": ".configuration",
        "try/classes": ".copies pre",
        "batching/classes": ".explanation p",
        "jobs": ".tabulator-placeholder",
        "dead": ".tabulator-placeholder",
    }
    barriers = {}
    for route, drawn in views.items():
        open_view(console, route)
        expect(console.locator(drawn).first).to_be_visible()
        barriers[route] = grave_barriers(console)
    assert {route: found for route, found in barriers.items() if found} == {}


def test_a_gateway_that_does_not_reply_keeps_nothing_waiting(
    console: Any, server: ConsoleServer, page_problems: list[str]
) -> None:
    server.classify(3)
    expect(cell(console, "classes", "requests_per_s")).to_be_visible()
    open_view(console, "try/classes")
    send = console.get_by_role("button", name="Send request")
    expect(send).not_to_have_attribute("aria-disabled", "true")
    server.kill("gateway", signal.SIGSTOP)
    try:
        # The page does not know yet: the request ends as soon as the console does.
        send.click()
        expect(console.locator(".response").get_by_role("alert")).to_contain_text("No gateway replies")
        expect(console.locator(".banner")).to_contain_text("No gateway replies: clients can't connect.")
        expect(send).to_have_attribute("aria-disabled", "true")
        open_view(console, "overview")
        expect(figure(console, "Requests")).to_have_text("–")
        expect(cell(console, "classes", "requests_per_s")).to_have_text("–")
        open_view(console, "models/classes")
        expect(figure(console, "Requests")).to_have_text("–")
        expect(figure(console, "Workers")).to_have_text("1")
        open_view(console, "jobs")
        expect(console.locator("main")).to_contain_text("no gateway replies")
    finally:
        server.kill("gateway", signal.SIGCONT)
    expect(console.locator(".banner")).to_have_count(0)
    wait_until(lambda: server.is_ready("classes"))
    open_view(console, "models/classes")
    expect(figure(console, "Requests")).not_to_have_text("–")
    page_problems[:] = [problem for problem in page_problems if "503" not in problem]

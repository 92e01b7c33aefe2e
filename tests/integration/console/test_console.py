"""The console's page on a real server: what it shows is what the API says, and each action does what it says."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.console.console_server import BATCHED, DELAYED, SCORES, ConsoleServer, tensor, write_models
from tests.support.console.views import cell, figure, open_view, picture
from tests.support.servers.roles import role_started
from tests.support.waiting import running, wait_until

expect = pytest.importorskip("playwright.sync_api").expect


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleServer]:
    """A server whose console may change things."""
    folder = tmp_path_factory.mktemp("console")
    write_models(folder / "models")
    started = ConsoleServer(folder, folder / "models")
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


def test_numbers_agree_with_metrics(console: Any, server: ConsoleServer) -> None:
    rate = "() => fetch('/api/series?model=classes').then(a => a.json()).then(a => a.resolution[0])"

    def ticks() -> dict[str, list[float]]:
        return dict(console.evaluate(rate))

    def summed() -> float:
        series = ticks()
        steps_s = np.diff(series["at_ms"], prepend=series["at_ms"][0] - 1000) / 1000
        return float(np.nansum(np.array(series["requests_per_s"], float) * steps_s))  # a tick may know nothing

    # From the first rate on, the console knows what was counted before.
    wait_until(lambda: any(rate is not None for rate in ticks()["requests_per_s"]))
    before = summed()
    server.classify(23)
    counted = int(server.metrics()["nv_inference_request_success", "classes"])
    assert counted >= 23
    open_view(console, "models/classes?tab=statistics")
    row = console.get_by_role("row", name="Succeeded")
    expect(row.get_by_role("cell").nth(1)).to_have_text(str(counted))
    # The rates of the ticks, over their times, are the requests.
    wait_until(lambda: abs(summed() - before - 23) < 2)


def test_the_overview_shows_load_while_there_is_some(console: Any, server: ConsoleServer) -> None:
    with load(server):
        expect(figure(console, "Requests")).not_to_have_text("0/s")
        expect(figure(console, "Median")).to_have_text(re.compile("[mµ]s$"))
        expect(cell(console, BATCHED, "requests_per_s")).not_to_have_text("0")


def test_a_request_from_the_form_is_answered_as_any_other(console: Any, server: ConsoleServer) -> None:
    open_view(console, "try/classes")
    console.get_by_label("Content of IN").last.fill(json.dumps(SCORES))
    console.get_by_role("button", name="Send request").click()
    response = console.get_by_role("region", name="Response")
    expect(response).to_contain_text("succeeded")
    best = response.locator(".classes li").first
    expect(best).to_have_text("bee0.900")
    for language, text in (("curl", "curl -s http://"), ("Python", "tritonclient.http"), ("nats", "nats request")):
        console.get_by_role("tab", name=language, exact=True).click()
        expect(console.locator(".copies pre")).to_contain_text(text)


def test_silent_connections_keep_nobody_out(server: ConsoleServer) -> None:
    port = int(server.console_url.rstrip("/").rpartition(":")[2])
    silent = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(250)]
    try:
        with urllib.request.urlopen(f"{server.console_url}/api/session", timeout=10) as answer:
            assert answer.status == 200
    finally:
        for connection in silent:
            connection.close()


def test_the_copied_requests_are_answered(console: Any, server: ConsoleServer) -> None:
    open_view(console, "try/classes")
    console.get_by_label("Content of IN").last.fill(json.dumps(SCORES))
    shell = console.locator(".copies pre").inner_text()
    answer = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout
    assert json.loads(answer)["outputs"][0]["data"][0].endswith(":1:bee")
    console.get_by_role("tab", name="Python", exact=True).click()
    program = console.locator(".copies pre").inner_text()
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "1:bee" in printed


def test_the_way_of_a_request_is_drawn(console: Any, server: ConsoleServer) -> None:
    open_view(console, "try/classes")
    console.get_by_role("button", name="Send request").click()
    console.get_by_role("link", name="This request").click()
    way = console.get_by_role("img", name="The way of the request")
    expect(way).to_have_attribute("aria-label", re.compile("queue .*, compute .* in all"))
    expect(console.get_by_role("region", name="Request ").first).to_contain_text("Came overnats")
    expect(console.locator(".tabulator-row", has_text="classes").first).to_be_visible()


def test_batches_are_drawn_and_explained(console: Any, server: ConsoleServer) -> None:
    open_view(console, f"batching/{DELAYED}")
    expect(console.get_by_text("No batch has been formed since you opened this page.")).to_be_visible()
    with load(server, clients=2, model=DELAYED):
        reason = "Batches leave after 20.0 ms because the delay ends"
        expect(console.locator(".explanation p").first).to_contain_text(reason)
        # Two clients: a quarter of the eight rows, or less where one of them comes late.
        expect(console.locator(".explanation")).to_contain_text(re.compile(r"\b[12]\d % of the rows are used\."))
        expect(figure(console, "Mean size")).to_contain_text(re.compile(r"[12]"))
        console.wait_for_timeout(1500)
        picture(console, "console-batching-delay")


def test_values_that_do_not_fit_are_not_sent(console: Any) -> None:
    open_view(console, "try/classes")
    console.get_by_label("Content of IN").last.fill("[1, 2]")
    expect(console.get_by_role("alert")).to_have_text("IN: 2 values do not fit shape [1, 5], which has 5")
    expect(console.get_by_role("button", name="Send request")).to_have_attribute("aria-disabled", "true")


def test_an_error_is_shown_as_the_api_has_it(console: Any) -> None:
    open_view(console, "try/faulty")
    console.get_by_label("Content of WHAT").last.fill("error")
    console.get_by_role("button", name="Send request").click()
    expect(console.get_by_role("alert")).to_have_text("as you asked")


def test_traffic_follows_the_sliders(console: Any, server: ConsoleServer) -> None:
    assert server.version_served() == "3"
    open_view(console, "models/versions")
    console.get_by_label("Version 1").fill("100")
    console.get_by_role("button", name="Set shares").click()
    expect(console.get_by_role("status").get_by_text("is split 1=100 2=0 3=0")).to_be_visible()
    assert server.api("GET", "/v2/models/versions/traffic")["weights"] == {"1": 100.0}
    assert server.version_served() == "1"
    expect(console.get_by_text("Rule: 1=100")).to_be_visible()
    picture(console, "console-model")
    console.get_by_role("button", name="Remove the rule").click()
    expect(console.get_by_text("No rule: the latest version gets all.")).to_be_visible()
    assert server.version_served() == "3"
    console.get_by_role("tab", name="History").click()
    expect(console.get_by_text("no rule → 1=100")).to_be_visible()


def test_models_are_unloaded_and_loaded(console: Any, server: ConsoleServer) -> None:
    open_view(console, "models/slow")
    console.get_by_role("button", name="Unload").click()
    console.get_by_role("dialog").get_by_role("button", name="Keep").click()
    assert server.is_ready("slow")
    console.get_by_role("button", name="Unload").click()
    console.get_by_role("dialog").get_by_role("button", name="Unload").click()
    expect(console.get_by_role("button", name="Load", exact=True)).to_be_visible()
    assert not server.is_ready("slow")
    console.get_by_role("button", name="Load", exact=True).click()
    expect(console.get_by_role("button", name="Reload")).to_be_visible()
    wait_until(lambda: server.is_ready("slow"))
    console.get_by_role("button", name="Reload").click()
    expect(console.get_by_text("Model slow is loaded again")).to_be_visible()
    changes = server.api("GET", "/v2/models/slow/history")["changes"]
    assert [change["kind"] for change in changes][:3] == ["load", "load", "unload"]


ITEMS = 500
"""Of a job: more than are in flight at its beginning."""


def test_a_job_is_submitted_paused_and_done(console: Any, server: ConsoleServer, tmp_path: Path) -> None:
    items = tmp_path / "items.jsonl"
    # The model keeps the item 0 until the job has been paused.
    items.write_text("".join(f'{{"VALUE": {number}}}\n' for number in range(ITEMS)))
    open_view(console, "jobs")
    console.get_by_role("button", name="Submit a job").click()
    form = console.get_by_label("Submit a job")
    form.get_by_label("Model").select_option("gated")
    form.get_by_label("Items").last.set_input_files(items)
    form.get_by_role("button", name="Submit", exact=True).click()
    panel = console.get_by_label("Job batch-")
    expect(panel).to_contain_text("running")
    (job,) = server.api("GET", "/v2/jobs")["jobs"]
    panel.get_by_role("button", name="Pause").click()
    wait_until(lambda: server.api("GET", f"/v2/jobs/{job['id']}")["wanted"] == "pause")
    (server.folder / "models" / "gated" / "go").touch()
    panel.get_by_role("button", name="Resume").click()
    expect(panel).to_contain_text("succeeded", timeout=20_000)
    expect(panel).to_contain_text(f"{ITEMS} of {ITEMS} items (100 %)")
    with console.expect_download() as download:
        panel.get_by_role("link", name="Results").click()
    rows = [json.loads(line) for line in Path(download.value.path()).read_text().splitlines()]
    assert sorted(row["item"] for row in rows) == list(range(ITEMS))
    assert all(len(row["outputs"]["TURN"]) == 1 for row in rows)
    panel.get_by_role("button", name="Delete").click()
    console.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(console.get_by_text("No job", exact=True)).to_be_visible()
    assert server.api("GET", "/v2/jobs")["jobs"] == []


def test_a_job_is_cancelled_and_retried(console: Any, server: ConsoleServer, tmp_path: Path) -> None:
    items = "".join(f'{{"VALUE": {number}, "DELAY_MS": 50}}\n' for number in range(2000))
    id = submit(server, "slow", items)
    open_view(console, f"jobs/{id}")
    panel = console.get_by_label(f"Job {id}")
    panel.get_by_role("button", name="Cancel").click()
    console.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(panel.locator(".state")).to_have_text("cancelled")
    assert server.api("GET", f"/v2/jobs/{id}")["state"] == "cancelled"
    panel.get_by_role("button", name="Retry").click()
    expect(panel.locator(".state")).to_have_text("running")
    server.api("POST", f"/v2/jobs/{id}/cancel")
    wait_until(lambda: server.api("GET", f"/v2/jobs/{id}")["state"] == "cancelled")
    server.api("DELETE", f"/v2/jobs/{id}")


def submit(server: ConsoleServer, model: str, items: str) -> str:
    request = urllib.request.Request(
        f"http://{server.http_place}/v2/jobs?model={model}", items.encode(), {"Content-Type": "application/jsonl"}
    )
    with urllib.request.urlopen(request, timeout=15) as answer:
        return str(json.load(answer)["id"])


def test_dead_letters_are_looked_into_replayed_and_purged(console: Any, server: ConsoleServer) -> None:
    id = server.dies()
    wait_until(lambda: server.api("GET", f"/v2/jobs/{id}")["status"] == "dead-lettered")
    open_view(console, "dead")
    cell(console, "faulty", "reason").click()
    letter = console.get_by_label("Dead letter", exact=False).first
    expect(letter).to_contain_text("died 4 times while running this request")
    expect(letter.locator("pre")).to_contain_text('"kill"')
    expect(letter.get_by_text("Weir-Digest", exact=True)).to_be_visible()
    picture(console, "console-dead")
    letter.get_by_role("link", name=id).click()
    expect(console.get_by_label(f"Request {id}")).to_contain_text("dead-lettered after 4 attempts")
    open_view(console, "dead")
    cell(console, "faulty", "reason").click()
    console.get_by_role("button", name="Replay", exact=True).click()
    expect(console.get_by_text("The request runs again")).to_be_visible()
    # It dies again, as a new letter.
    wait_until(lambda: server.api("GET", f"/v2/jobs/{id}")["status"] == "dead-lettered")
    console.get_by_role("button", name="Purge all").click()
    console.get_by_role("dialog").get_by_role("button", name="Purge all").click()
    expect(console.get_by_text("No dead letter: every durable request was done")).to_be_visible()
    assert server.metrics()["weir_durable_dead_letters", "faulty"] == 0


def test_a_suspended_worker_is_reported_with_what_to_do(console: Any, server: ConsoleServer) -> None:
    open_view(console, "topology")
    server.kill("worker", signal.SIGSTOP)
    try:
        problem = console.locator(".problem.warning", has_text="does not reply: it is dead, suspended or disconnected")
        expect(problem).to_be_visible()
        expect(console.locator(".tabulator-row", has_text="worker").first).to_contain_text("silent")
        picture(console, "console-topology")
    finally:
        server.kill("worker", signal.SIGCONT)
    expect(problem).to_have_count(0)


def test_a_read_only_console_says_why_it_changes_nothing(
    page: Any, page_problems: list[str], server: ConsoleServer, tmp_path: Path
) -> None:
    words = ["console", f"--nats={server.nats_url}", "--console-port=0"]
    process, facts = role_started(words, tmp_path, tmp_path / "log")
    try:
        assert facts.get("ready"), (tmp_path / "log").read_text()
        page.goto(f"http://127.0.0.1:{facts['console_port']}/#/models/classes")
        unload = page.get_by_role("button", name="Unload")
        expect(unload).to_have_attribute("aria-disabled", "true")
        expect(unload).to_have_attribute("title", re.compile("read-only: .*--console-allow-changes"))
        unload.click(force=True)
        expect(page.get_by_role("dialog")).to_have_count(0)
        asked = "{method: 'POST', headers: {'X-Weir-Console': '1'}}"
        assert page.evaluate(f"() => fetch('/api/models/classes/unload', {asked}).then(answer => answer.status)") == 403
        page_problems[:] = [problem for problem in page_problems if "403" not in problem]
        assert server.is_ready("classes")
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def load(server: ConsoleServer, clients: int = 8, model: str = BATCHED) -> Iterator[None]:
    """Requests to `model`, each client one after another, while the block runs."""
    is_over = threading.Event()

    def send() -> None:
        with server.http() as client:
            while not is_over.is_set():
                client.infer(model, [tensor("IN", np.ones((1, 4), np.float32))])

    with running([threading.Thread(target=send) for _ in range(clients)], is_over):
        yield

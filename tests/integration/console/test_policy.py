"""The console and the API's pages in a browser, on a server with an access policy: what each role sees, and may do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.access.served import Guarded
from tests.support.clients.browser import TIMEOUT_MS, watch
from tests.support.console.console_server import SCORES, write_models
from tests.support.console.views import VIEWS, open_view
from tests.support.waiting import wait_until

expect = pytest.importorskip("playwright.sync_api").expect

POLICY = """
roles:
  anonymous: {rules: [{actions: [health]}]}
  watcher: {rules: [{actions: [console-read]}]}
  operator: {rules: [{actions: ["*"]}]}
"""
CHANGE = "You may not change things from here: no rule allows the role watcher 'console-change'."
DENIED = "Failed to load resource: the server responded with a status of 403"


class World(Guarded):
    """A server with a console that may change things, and a key for each role."""

    def __init__(self, folder: Path) -> None:
        (folder / "jobs").mkdir()
        console = "--console-port=0", "--console-allow-changes", f"--batch-root={folder / 'jobs'}"
        super().__init__(folder, folder / "models", POLICY, *console, "--model-control-mode=explicit", "--load-model=*")
        self.console_url = self.printed_value("console")
        self.keys = {role: self.new_key(f"{role}-1", role) for role in ("watcher", "operator")}
        for key in self.keys.values():
            wait_until(lambda shown=key: httpx.get(self.console_url, auth=("any", shown)).status_code == 200)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("policy")
    write_models(folder / "models")
    with World(folder) as server:
        yield server


@contextmanager
def browsing(chromium: Any, key: str, url: str) -> Iterator[tuple[Any, list[str]]]:
    """A page at `url` of a user whose password is `key`, and what it reports."""
    context = chromium.new_context(http_credentials={"username": "any", "password": key}, reduced_motion="reduce")
    context.set_default_timeout(TIMEOUT_MS)
    problems: list[str] = []
    try:
        page = context.new_page()
        watch(page, problems)
        assert page.goto(url).status == 200
        yield page, problems
    finally:
        context.close()


def test_a_browser_without_a_key_is_asked_for_a_password(world: World, chromium: Any) -> None:
    for url in (world.console_url, f"http://{world.http_place}/docs"):
        refused = httpx.get(url)
        assert refused.status_code == 401
        # Each scheme in a header of its own: Chromium reads a header as one challenge.
        assert refused.headers.get_list("www-authenticate") == ['Bearer realm="weir"', 'Basic realm="weir"']
    context = chromium.new_context()
    try:
        with pytest.raises(Exception, match="ERR_INVALID_AUTH_CREDENTIALS"):
            context.new_page().goto(world.console_url)  # the answer of one who closes the dialogue
    finally:
        context.close()


def test_an_operator_does_everything(world: World, chromium: Any) -> None:
    with browsing(chromium, world.keys["operator"], world.console_url) as (page, problems):
        for route, title in VIEWS.items():
            open_view(page, route)
            expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
        open_view(page, "try/classes")
        page.get_by_label("Content of IN").last.fill(json.dumps(SCORES))
        page.get_by_role("button", name="Send request").click()
        expect(page.locator(".copies")).to_contain_text("show your key too")
        expect(page.get_by_role("region", name="Response").locator(".classes li").first).to_have_text("bee0.900")
        open_view(page, "models/slow")
        page.get_by_role("button", name="Unload").click()
        page.get_by_role("dialog").get_by_role("button", name="Unload").click()
        page.get_by_role("button", name="Load", exact=True).click()
        expect(page.get_by_role("button", name="Reload")).to_be_visible()
        open_view(page, "models/slow?tab=history")
        expect(page.locator("main")).to_contain_text("unload")
        assert problems == []


def test_an_operator_runs_a_job(world: World, chromium: Any, tmp_path: Path) -> None:
    items = tmp_path / "items.jsonl"
    items.write_text("".join(json.dumps({"IN": SCORES}) + "\n" for _ in range(3)))
    with browsing(chromium, world.keys["operator"], f"{world.console_url}#/jobs") as (page, problems):
        page.get_by_role("button", name="Submit a job").click()
        form = page.get_by_label("Submit a job")
        form.get_by_label("Model").select_option("classes")
        form.locator("input[type=file]").set_input_files(items)
        form.get_by_role("button", name="Submit", exact=True).click()
        expect(page.get_by_label("Job batch-").first).to_contain_text("succeeded")
        assert problems == []


def test_an_operator_deletes_a_dead_letter(world: World, chromium: Any) -> None:
    inputs = [{"name": "WHAT", "datatype": "BYTES", "shape": [1, 1], "data": ["kill"]}]
    key = world.keys["operator"]
    later = {"prefer": "respond-async"}
    accepted = world.ask("POST", "/v2/models/faulty/infer", key, json={"inputs": inputs}, headers=later)
    assert accepted.status_code == 202, accepted.text
    with browsing(chromium, key, f"{world.console_url}#/dead") as (page, problems):
        row = page.locator(".tabulator-row", has_text="faulty").first
        expect(row).to_be_visible(timeout=3 * TIMEOUT_MS)  # it is tried several times before
        page.get_by_role("button", name="Purge all").click()
        page.get_by_role("dialog").get_by_role("button", name="Purge all").click()
        expect(page.get_by_text("No dead letter: every durable request was done")).to_be_visible()
        assert problems == []


def test_a_watcher_sees_everything_and_is_told_what_it_may_not_do(world: World, chromium: Any) -> None:
    with browsing(chromium, world.keys["watcher"], world.console_url) as (page, problems):
        for route in ("overview", "topology", "models", "try", "batching", "requests"):
            open_view(page, route)
            expect(page.get_by_role("heading", name=VIEWS[route], exact=True)).to_be_visible()
        open_view(page, "models/classes")
        expect(page.get_by_text(CHANGE)).to_be_visible()
        expect(page.get_by_role("button", name="Unload")).to_have_attribute("aria-disabled", "true")
        open_view(page, "models/classes?tab=history")
        expect(page.get_by_text("You may not see the history: no rule allows")).to_be_visible()
        open_view(page, "try/classes")
        expect(page.get_by_role("alert")).to_contain_text("You may not see the model's inputs: no rule allows")
        assert problems == []
        for route, action in (("jobs", "jobs"), ("dead", "dead-letters")):
            open_view(page, route)
            expect(page.locator("main")).to_contain_text(f"no rule allows the role watcher '{action}'")
        assert [problem for problem in problems if DENIED not in problem] == []


def test_two_principals_see_their_own_models(world: World) -> None:
    unserved = "never-loaded"
    folder = world.folder / "models" / unserved
    folder.mkdir()
    (folder / "config.pbtxt").write_text('backend: "onnxruntime"')

    def names(role: str) -> set[str]:
        models = httpx.get(f"{world.console_url}/api/models", auth=("any", world.keys[role])).json()["models"]
        return {model["id"] for model in models}

    wait_until(lambda: unserved in names("operator"))
    for _ in range(3):
        assert unserved not in names("watcher")
        assert unserved in names("operator")


def test_the_pages_of_the_api_work_with_a_password(world: World, chromium: Any) -> None:
    url = f"http://{world.http_place}"
    with browsing(chromium, world.keys["operator"], f"{url}/docs") as (page, problems):
        expect(page.get_by_text("/v2/models/{").first).to_be_visible()
        assert page.evaluate("fetch('/openapi.json').then(a => a.status)") == 200
        assert problems == []

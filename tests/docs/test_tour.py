"""The walk of docs/tour.md, on the demo's server with the console in a browser. `make pictures` keeps its screenshots."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.browser import chromium, page, page_problems
from tests.support.console.views import cell, figure, open_view, picture
from tests.support.docs.pages import commands
from tests.support.servers.demo import Served, demo_served, environment, in_venv
from weir.console.npm.copy_files import CONSOLE, ROOT

__all__ = ["chromium", "page", "page_problems"]

expect = pytest.importorskip("playwright.sync_api").expect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOUR = "docs/tour.md"

LONG_MS = 30_000


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo's server with a console."""
    if not (ROOT / CONSOLE / "preact.mjs").exists():
        pytest.skip("the libraries of the page are missing: make install")
    with demo_served(tmp_path_factory.mktemp("tour"), "--console-port=0") as served:
        yield served


@pytest.fixture
def console(demo: Served, page: Any) -> Any:
    """The console's page at its overview."""
    page.goto(demo.console_url)
    expect(page.locator(".summary")).to_contain_text("healthy", timeout=LONG_MS)
    return page


def samples(demo: Served) -> Path:
    return demo.folder / ".weir" / "demo" / "samples"


def test_1_the_console_is_open(demo: Served, console: Any) -> None:
    assert re.search(r"^ +console +http://127\.0\.0\.1:\d+$", demo.printed, re.MULTILINE)
    expect(console.locator(".summary")).to_contain_text("1 gateway, 1 scheduler, 1 worker")
    open_view(console, "models")
    expect(console.locator(".tabulator-row", has_text="silero_vad")).to_contain_text("ready")
    console.wait_for_timeout(500)
    picture(console, "tour-models")


def test_2_a_file_is_recognised(demo: Served, console: Any) -> None:
    open_view(console, "try/file_kind")
    console.get_by_role("button", name="File", exact=True).click()
    console.get_by_label("File for FILE").set_input_files(ROOT / "weir" / "demo" / "serve.py")
    console.get_by_role("button", name="Send request").click()
    expect(console.locator(".classes li").first).to_contain_text("python", timeout=LONG_MS)
    expect(console.get_by_role("heading", name="Where the time went")).to_be_visible()
    console.wait_for_timeout(500)
    picture(console, "tour-file")


def test_3_speech_is_heard(demo: Served, console: Any) -> None:
    open_view(console, "try/silero_vad")
    console.get_by_role("button", name="Sound").click()
    console.get_by_label("File for AUDIO").set_input_files(samples(demo) / "voice.wav")
    console.get_by_role("button", name="Send 125 chunks").click()
    expect(console.get_by_text("chunk 125 of 125")).to_be_visible(timeout=LONG_MS)
    heard = console.get_by_role("img", name=re.compile("PROB for 125 chunks, at most (1|0.9|1.00)"))
    expect(heard).to_be_visible()
    console.wait_for_timeout(500)
    picture(console, "tour-sound")


def test_4_a_picture_is_read(demo: Served, console: Any) -> None:
    open_view(console, "try/ocr")
    console.get_by_role("button", name="Picture").click()
    console.get_by_label("File for IMAGE").set_input_files(samples(demo) / "picture.png")
    console.get_by_role("button", name="Send request").click()
    rows = console.get_by_role("region", name="Response")
    for line in ("A weir is a low dam", "that turns uneven flow", "into a steady one."):
        expect(rows).to_contain_text(line, timeout=LONG_MS)
    console.wait_for_timeout(500)
    picture(console, "tour-picture")


def test_5_batches_form_under_load(demo: Served, console: Any) -> None:
    (command,) = (line for page, line in commands() if page == TOUR and line.startswith(".venv/bin/weir perf "))
    load = subprocess.Popen(in_venv(command), cwd=demo.folder, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        open_view(console, "batching/magika")
        expect(console.locator(".explanation p").first).to_contain_text("Batches leave", timeout=LONG_MS)
        expect(figure(console, "Mean size")).not_to_have_text(re.compile("^(–|1.00)"))
        console.wait_for_timeout(5000)
        picture(console, "tour-batching")
        open_view(console, "overview")
        expect(figure(console, "Requests")).not_to_have_text("0/s")
        console.wait_for_timeout(2000)
        picture(console, "tour-overview")
        open_view(console, "requests")
        cell(console, "magika", "id").click()
        way = console.get_by_role("img", name="The way of the request")
        expect(way).to_have_attribute("aria-label", re.compile("compute"))
        console.get_by_role("button", name="Hold").click()
        console.wait_for_timeout(500)
        picture(console, "tour-request")
    finally:
        printed = load.communicate(timeout=60)[0]
    assert load.returncode == 0, printed


def test_6_an_offline_job_runs(demo: Served, console: Any) -> None:
    open_view(console, "jobs")
    console.get_by_role("button", name="Submit a job").click()
    form = console.get_by_label("Submit a job")
    form.get_by_label("Model").select_option("file_kind")
    form.get_by_label("Items").last.set_input_files(samples(demo) / "files.jsonl")
    form.get_by_role("button", name="Submit", exact=True).click()
    panel = console.get_by_label("Job batch-")
    expect(panel).to_contain_text("items/s", timeout=LONG_MS)
    picture(console, "tour-job")
    expect(panel).to_contain_text("succeeded", timeout=60_000)
    expect(panel).to_contain_text("1\u202f000 of 1\u202f000 items (100 %)")
    with console.expect_download() as download:
        panel.get_by_role("link", name="Results").click()
    first = json.loads(Path(download.value.path()).read_text().splitlines()[0])
    assert first["source"] == "file-0"


def test_7_a_worker_is_killed(demo: Served, console: Any) -> None:
    open_view(console, "topology")
    status = console.evaluate("() => fetch('/api/status').then(answer => answer.json())")
    (worker,) = (role for role in status["roles"] if role["role"] == "worker")
    os.kill(worker["pid"], signal.SIGKILL)
    problem = console.locator(".problem", has_text=f"worker {worker['id']}")
    expect(problem).to_be_visible(timeout=LONG_MS)
    picture(console, "tour-worker")
    # Another one has taken its place, and the models are served again.
    open_view(console, "try/file_kind")
    console.get_by_label("Content of FILE").last.fill("SELECT name FROM products;")
    console.get_by_role("button", name="Send request").click()
    expect(console.get_by_role("region", name="Response")).to_contain_text("succeeded", timeout=LONG_MS)

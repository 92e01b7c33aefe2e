"""The console's page with the answers of a simulated cluster: 200 models on 50 workers, with names that are HTML."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.clients.browser import HEIGHT
from tests.support.console.large_cluster import FAILED_JOB, HOSTILE, HOSTILE_HOST, HOSTILE_REASON, SPLIT
from tests.support.console.page_server import PageServer
from tests.support.console.views import VIEWS, open_view
from tests.support.waiting import wait_until

expect = pytest.importorskip("playwright.sync_api").expect

NARROW = 360
MAX_BLOCKED_MS = 50
TRACED_MS = 6000

ROUTES = {
    **{view: view for view in VIEWS},
    "model": f"models/{quote(HOSTILE, safe='')}",
    "history": f"models/{quote(HOSTILE, safe='')}?tab=history",
    "statistics": f"models/{quote(HOSTILE, safe='')}?tab=statistics",
    "configuration": f"models/{quote(HOSTILE, safe='')}?tab=configuration",
    "form": f"try/{quote(HOSTILE, safe='')}",
    "request": f"requests/{quote(HOSTILE, safe='')}",
    "job": "jobs/batch-0123456789abcdef",
    "letter": "dead/4",
    "process": "topology?process=worker-00000000-00000000",
    "traffic": f"models/{SPLIT}",
    "failed job": f"jobs/{FAILED_JOB}",
}


@pytest.fixture
def console(large: PageServer, page: Any) -> Any:
    """The page at its overview; it is closed before its server."""
    page.goto(large.url)
    expect(page.locator(".figure-value").first).to_contain_text("/s")
    return page


def test_texts_of_the_server_are_never_html(console: Any) -> None:
    for route in ROUTES.values():
        open_view(console, route)
        console.wait_for_timeout(300)
        # A mouse over each kind of thing shows its tooltip.
        for place in console.locator(".chart canvas").all()[:2]:
            place.hover(position={"x": 60, "y": 30}, force=True)
    assert console.evaluate("window.hacked") is None
    assert console.locator("main img[src='x']").count() == 0
    open_view(console, ROUTES["letter"])
    letter = console.get_by_label("Dead letter 4")
    expect(letter.locator("pre")).to_have_text(HOSTILE)
    expect(letter.locator(".failure")).to_have_text(HOSTILE_REASON)
    open_view(console, "topology")
    expect(console.locator(".tabulator-cell", has_text=HOSTILE_HOST).first).to_be_visible()


def test_keys(console: Any) -> None:
    for key, title in (("t", "Topology"), ("m", "Models"), ("b", "Batching"), ("o", "Overview"), ("m", "Models")):
        console.keyboard.press("g")
        console.keyboard.press(key)
        expect(console.get_by_role("heading", name=title, exact=True)).to_be_visible()
    table = console.get_by_role("grid", name="Models")
    expect(table.get_by_role("row").nth(3)).to_be_visible()
    table.focus()
    for _ in range(3):
        console.keyboard.press("ArrowDown")
    expect(console.locator('.tabulator-row[aria-selected="true"]')).to_contain_text("model-002")
    console.keyboard.press("End")
    expect(console.locator('.tabulator-row[aria-selected="true"]')).to_contain_text("model-199")
    console.keyboard.press("Home")
    console.keyboard.press("ArrowDown")
    console.keyboard.press("Enter")
    expect(console.get_by_role("heading", name="model-001")).to_be_visible()
    console.keyboard.press("?")
    expect(console.get_by_role("dialog", name="Keys")).to_be_visible()
    console.keyboard.press("Escape")
    console.keyboard.press("/")
    console.keyboard.type("model-12")
    expect(console.get_by_role("option", name="model-121")).to_be_visible()
    console.keyboard.press("ArrowDown")
    console.keyboard.press("Enter")
    expect(console.get_by_role("heading", name="model-121")).to_be_visible()


def test_names_are_filtered_and_deep_links_open(console: Any, large: PageServer) -> None:
    console.goto(f"{large.url}#/models?q=model-19&show=ready")
    expect(console.get_by_label("Filter by name")).to_have_value("model-19")
    expect(console.locator(".tabulator-row")).to_have_count(10)
    console.get_by_label("Filter by name").fill("model-199")
    expect(console.locator(".tabulator-row")).to_have_count(1)
    console.goto(f"{large.url}#/models/model-007?tab=statistics")
    expect(console.get_by_text("12 inferences in 6 executions")).to_be_visible()


def test_a_request_is_there_to_copy_once_the_address_of_a_gateway_is_known(large: PageServer, page: Any) -> None:
    page.route("**/api/status", lambda _route: None)
    page.goto(f"{large.url}#/try/model-007")
    expect(page.get_by_role("button", name="Send request")).to_be_visible()
    copies = page.get_by_label("The same request elsewhere")
    expect(copies).to_contain_text("once the address of a gateway is known")
    expect(copies.locator("pre")).to_have_count(0)
    page.unroute("**/api/status")
    expect(copies.locator("pre")).to_contain_text("http://127.0.0.1:8123/v2/models/model-007/infer")
    page.get_by_role("tab", name="nats", exact=True).click()
    expect(copies.locator("pre")).to_contain_text("export NATS_URL=$(cat /data/mine/nats-url)")


def test_a_request_to_copy_is_encrypted_if_the_gateway_is(large: PageServer, page: Any) -> None:
    large.cluster.gateway_urls = ["https://127.0.0.1:8123", "grpcs://127.0.0.1:8124", "https://127.0.0.1:8125/metrics"]
    page.goto(f"{large.url}#/try/model-007")
    copies = page.get_by_label("The same request elsewhere")
    expect(copies.locator("pre")).to_contain_text("curl -s https://127.0.0.1:8123/v2/models/model-007/infer")
    page.get_by_role("tab", name="Python", exact=True).click()
    expect(copies.locator("pre")).to_contain_text('InferenceServerClient("127.0.0.1:8123", ssl=True)')


def test_a_part_of_the_time_is_looked_at_by_dragging(console: Any) -> None:
    # Charts are drawn in tasks of their own: drag when the cursor says that one is ready.
    chart = console.locator(".line-chart .chart").nth(1)
    follow = console.get_by_role("button", name="Follow again")
    for _ in range(60):
        box = chart.bounding_box()  # what comes above it later moves it
        console.mouse.move(box["x"] + 150, box["y"] + 60)
        console.mouse.down()
        console.mouse.move(box["x"] + 220, box["y"] + 70, steps=4)
        console.mouse.up()
        if follow.is_visible():
            break
        console.wait_for_timeout(100)
    expect(follow).to_be_visible()
    expect(console.get_by_role("button", name="5 min")).to_have_attribute("aria-pressed", "false")
    follow.click()
    expect(console.get_by_role("button", name="5 min")).to_have_attribute("aria-pressed", "true")


def test_a_lost_server_is_shown_and_retried(console: Any, page_problems: list[str]) -> None:
    console.route("**/api/**", lambda route: route.abort("connectionrefused"))
    expect(console.get_by_role("alert")).to_contain_text("The console's server has not replied since")
    expect(console.locator("main.stale")).to_have_count(1)
    console.unroute("**/api/**")
    expect(console.get_by_role("alert")).to_have_count(0, timeout=15_000)
    expect(console.locator("main.stale")).to_have_count(0)
    page_problems.clear()


@pytest.mark.slow
def test_a_lost_broker_is_shown(console: Any, large: PageServer) -> None:
    large.cluster.broker_error = f"connection refused {HOSTILE}"
    expect(console.get_by_role("alert")).to_contain_text(f"can't reach the NATS server: connection refused {HOSTILE}")
    large.cluster.broker_error = ""
    expect(console.get_by_role("alert")).to_have_count(0)


def test_callers_are_shown_where_a_policy_tells_them_apart(console: Any, large: PageServer) -> None:
    table = console.get_by_label("Callers")
    expect(table).to_have_count(0)
    large.cluster.callers = [
        {"name": HOSTILE, "in_flight": 1, "refused": 2},
        {"name": "acme", "in_flight": 3, "refused": 0},
    ]
    expect(table.locator("tbody tr").first).to_contain_text("acme")
    expect(table.locator("tbody tr").nth(1)).to_contain_text(HOSTILE)
    large.cluster.callers = []
    expect(table).to_have_count(0)


def test_a_dead_worker_is_marked(console: Any, large: PageServer) -> None:
    open_view(console, "topology")
    large.cluster.silent.add(large.cluster.workers[7])
    expect(console.get_by_text(f"worker {large.cluster.workers[7]} does not reply")).to_be_visible()
    expect(console.get_by_text("Look at its log and at its host.")).to_be_visible()
    expect(console.get_by_role("link", name="Topology").locator("em")).to_have_text("2")
    console.get_by_role("link", name="Look at the process").click()
    expect(console.get_by_label(f"Process {large.cluster.workers[7]}")).to_be_visible()


@pytest.mark.slow
def test_only_what_is_seen_is_asked_for(console: Any, large: PageServer) -> None:
    open_view(console, "jobs")
    expect(console.get_by_role("grid", name="Jobs")).to_be_visible()
    console.wait_for_timeout(300)
    before = dict(large.calls)
    wait_until(lambda: console.wait_for_timeout(50) or large.calls["/api/jobs"] >= before["/api/jobs"] + 2)
    assert large.calls["/api/series"] == before["/api/series"]
    console.evaluate(
        "() => { Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange')); }"
    )
    console.wait_for_timeout(200)
    hidden = dict(large.calls)
    console.wait_for_timeout(2500)
    assert large.calls == hidden
    console.evaluate(
        "() => { delete document.hidden; document.dispatchEvent(new Event('visibilitychange')); }",
    )
    wait_until(lambda: console.wait_for_timeout(50) or large.calls["/api/jobs"] > hidden["/api/jobs"])


def test_colours_are_chosen_and_kept(console: Any) -> None:
    def theme() -> str:
        return str(console.evaluate("document.documentElement.dataset.theme"))

    assert theme() == "light"
    console.emulate_media(color_scheme="dark")
    wait_until(lambda: theme() == "dark")
    console.get_by_role("button", name="Colours auto: as the system. Change to light.").click()
    assert theme() == "light"
    console.reload()
    assert theme() == "light"
    console.get_by_role("button", name="Colours light: light. Change to dark.").click()
    console.emulate_media(color_scheme="light")
    assert theme() == "dark"


def test_texts_have_contrast(console: Any) -> None:
    read = """() => Object.fromEntries(['ink', 'muted', 'accent', 'good', 'warn', 'bad',
        'on-accent', 'ground', 'panel', 'soft', 'accent-soft', 'warn-soft', 'bad-soft'].map(name =>
        [name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim()]))"""
    texts = ("ink", "muted", "accent", "good", "warn", "bad")
    pairs = [(text, ground) for text in texts for ground in ("ground", "panel", "soft")]
    pairs += [("on-accent", "accent"), ("ink", "accent-soft"), ("accent", "accent-soft"), ("ink", "warn-soft")]
    pairs += [("warn", "warn-soft"), ("bad", "bad-soft")]
    for scheme in ("light", "dark"):
        console.emulate_media(color_scheme=scheme)
        colours = console.evaluate(read)
        low = {pair: ratio for pair in pairs if (ratio := contrast(colours[pair[0]], colours[pair[1]])) < 4.5}
        assert low == {}, scheme


def contrast(first: str, second: str) -> float:
    """WCAG's contrast ratio of two colours of the form #rrggbb."""

    def luminance(colour: str) -> float:
        channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_narrow_screens_need_no_sideways_scrolling(console: Any) -> None:
    console.set_viewport_size({"width": NARROW, "height": HEIGHT})
    too_wide = {}
    for name, route in ROUTES.items():
        open_view(console, route)
        console.wait_for_timeout(250)
        width = console.evaluate("document.documentElement.scrollWidth")
        if width > NARROW:
            too_wide[name] = width
    assert too_wide == {}


def test_actions_send_what_they_say(console: Any, large: PageServer) -> None:
    large.allow_changes = True
    console.reload()
    open_view(console, ROUTES["letter"])
    console.get_by_role("button", name="Replay", exact=True).click()
    expect(console.get_by_text("The request runs again")).to_be_visible()
    open_view(console, ROUTES["job"])
    console.get_by_role("button", name="Pause").click()
    expect(console.get_by_text("The job is paused")).to_be_visible()
    assert large.actions == [("POST", "/api/dead/4/replay", ""), ("POST", f"/api/jobs/{ROUTES['job'][5:]}/pause", "")]


BATCH = {"padding": 0, "rows": 4, "held_us": 2000, "waited_us": [2000, 1500, 900, 100], "reason": "delay"}


EXPLAINED = [
    ([BATCH] * 9, (8, 2000), "Batches leave after 2.0 ms because the delay ends: for 100 % of them"),
    ([{**BATCH, "rows": 8, "reason": "full"}] * 3, (8, 2000), "Batches leave because they are full: 100 % have 8"),
    ([{**BATCH, "rows": 1, "reason": "free"}] * 3, (8, 0), "nearly each request found one at once: it runs alone"),
    ([{**BATCH, "reason": "free"}] * 3, (8, 0), "runs together, 4.0 rows on average"),
    ([{**BATCH, "reason": "single"}] * 3, (8, 0), "Each request is a batch: the model has no dynamic batching."),
    ([BATCH] * 9, (8, 2000), "50 % of the rows are used."),
    ([{**BATCH, "padding": 4}] * 9, (8, 2000), "50 % of the rows are used, and 50 % of what runs is padding."),
    ([{**BATCH, "rows": 1, "waited_us": [2000]}] * 9, (8, 2000), "a shorter max_queue_delay_microseconds"),
    ([], (8, 2000), "No batch has been formed since you opened this page."),
]


def test_what_is_seen_is_explained(console: Any) -> None:
    explain = """async ([batches, most, delay]) => {
        const { explained, figuresOf } = await import('/web/batching/explain.js');
        return explained(figuresOf(batches, {max_batch_size: most, max_queue_delay_us: delay})).join(' ');
    }"""
    for batches, settings, sentence in EXPLAINED:
        assert sentence in console.evaluate(explain, [batches, *settings])


def test_shares_add_up(console: Any) -> None:
    balance = """async ([shares, version, value]) =>
        (await import('/web/views/traffic.js')).balanced(shares, version, value)"""
    assert console.evaluate(balance, [{"1": 50, "2": 50, "3": 0}, "3", 50]) == {"1": 25, "2": 25, "3": 50}
    assert console.evaluate(balance, [{"1": 100, "2": 0, "3": 0}, "1", 40]) == {"1": 40, "2": 30, "3": 30}


def test_rows_that_come_while_a_table_is_built_are_shown(console: Any) -> None:
    shown = """async () => {
        const { html, render } = await import('/web/core/html.js');
        const { Table } = await import('/web/components/table.js');
        const place = document.body.appendChild(document.createElement('div'));
        const columns = [{ title: 'Id', field: 'id' }];
        const draw = (rows) => render(html`<${Table} label="Late" rows=${rows} columns=${columns} />`, place);
        const none = [];
        none.map = () => {  // the table reads its rows when it is made, and is built in a task of its own
            queueMicrotask(() => draw([{ id: 'first' }]));
            return [];
        };
        draw(none);
    }"""
    console.evaluate(shown)
    expect(console.get_by_role("grid", name="Late").get_by_role("gridcell", name="first")).to_be_visible()


def test_pictures_become_tensors(console: Any) -> None:
    read = """async ([dims, datatype, scale]) => {
        const { pictureLayout, drawnPicture, pixels } = await import('/web/tensors/media.js');
        const canvas = document.createElement('canvas');
        canvas.width = 30; canvas.height = 20;
        const context = canvas.getContext('2d');
        context.fillStyle = 'rgb(255, 51, 0)';
        context.fillRect(0, 0, 30, 20);
        const file = await new Promise(resolve => canvas.toBlob(resolve, 'image/png'));
        const layout = pictureLayout(dims);
        const drawn = await drawnPicture(file, layout.height, layout.width);
        const { shape, data } = pixels(drawn, layout, datatype, scale);
        const [first, last] = [Array.from(data.slice(0, 3)), Array.from(data.slice(-3))];
        return { shape, first, last, kind: data.constructor.name };
    }"""
    resized = console.evaluate(read, [[3, 8, 16], "FP32", "0–1"])
    assert resized["shape"] == [3, 8, 16]
    assert resized["first"] == [1, 1, 1]  # NCHW: red comes first
    assert resized["last"] == [0, 0, 0]
    own_size = console.evaluate(read, [[-1, -1, 3], "UINT8", "0–255"])
    assert own_size["shape"] == [20, 30, 3]
    assert own_size["first"] == [255, 51, 0]
    assert own_size["kind"] == "Uint8Array"


def test_content_of_each_datatype(console: Any) -> None:
    encode = """async ([datatype, values]) =>
        Array.from((await import('/web/tensors/datatypes.js')).encoded(datatype, values))"""
    assert console.evaluate(encode, ["FP16", [1, -2, 0.5, 65504]]) == [0, 60, 0, 192, 0, 56, 255, 123]
    assert console.evaluate(encode, ["BF16", [1, -2]]) == [128, 63, 0, 192]
    assert console.evaluate(encode, ["INT64", [-1]]) == [255] * 8
    assert console.evaluate(encode, ["BYTES", ["é"]]) == [2, 0, 0, 0, 195, 169]
    assert console.evaluate(encode, ["FP32", [1]]) == [0, 0, 128, 63]


@pytest.mark.timing
@pytest.mark.timeout(180)
@pytest.mark.parametrize("route", ["overview", "topology", "models", "batching/model-001", "requests"])
def test_no_tick_blocks_the_page(console: Any, chromium: Any, route: str, capsys: pytest.CaptureFixture[str]) -> None:
    open_view(console, route)
    console.wait_for_timeout(3000)
    chromium.start_tracing(page=console, categories=["disabled-by-default-devtools.timeline"])
    console.wait_for_timeout(TRACED_MS)
    events = json.loads(chromium.stop_tracing())["traceEvents"]
    mains = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    # Processor time, so that other work of the machine does not count.
    tasks_ms = [
        event.get("tdur", 0) / 1000
        for event in events
        if event["name"] == "RunTask" and (event["pid"], event["tid"]) in mains
    ]
    assert len(tasks_ms) > 10
    with capsys.disabled():
        print(f"\n{route}: longest task {max(tasks_ms):.0f} ms, {sum(tasks_ms) * 1000 / TRACED_MS:.0f} ms a second")
    assert max(tasks_ms) < MAX_BLOCKED_MS

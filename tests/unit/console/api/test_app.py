"""The console's application: who may act, what is passed on to gateways, and how the page is served."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import httpx
import pytest
from starlette.applications import Starlette

from tests.support.access.doors import application
from weir.calls.gateway_api import Response as ApiResponse
from weir.cluster.observation.store import BatchPage
from weir.cluster.status.snapshot import ClusterStatus
from weir.console.api.app import make_app
from weir.console.api.context import NO_GATEWAY, ConsoleContext
from weir.console.api.page import page_routes
from weir.console.collection.view import Tick
from weir.console.history.series import SeriesHistory
from weir.schemas.core.errors import unavailable

ACT = {"X-Weir-Console": "1"}


class Gateway:
    """Records requests, and answers them; with `is_away` there is none, and with `is_suspended` it never answers."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, bytes, Mapping[str, str]]] = []
        self.is_away = False
        self.is_suspended = False
        self.index = b'[{"name": "<b>&x", "state": "UNAVAILABLE", "reason": "unloaded"}]'

    async def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> ApiResponse:
        if self.is_suspended:
            await asyncio.Event().wait()
        if self.is_away:
            raise unavailable("no gateway is connected to the message broker")
        self.requests.append((method, path, body, headers))
        if path == "/v2/repository/index":
            return ApiResponse(200, {}, self.index)
        headers = {"content-type": "application/json", "x-other": "no", "retry-after": "3"}
        return ApiResponse(400 if "bad" in path else 200, headers, b'{"error": "as it is"}')


class View:
    """A cluster with a model that is not served."""

    class Catalog:
        """Knows `net`."""

        def index(self) -> list[Any]:
            return []

        def served_model(self, name: str) -> None:
            return None

        def knows(self, name: str) -> bool:
            return name == "net"

    def __init__(self) -> None:
        self.catalog = self.Catalog()
        self.history = SeriesHistory()
        self.tick = Tick(1, 5, None)
        self.is_connected = True
        self.has_gateway = True
        self.control_mode = "explicit"
        self.collections = 0
        self.lost_gateways = asyncio.Event()

    async def wait_without_gateway(self) -> None:
        await self.lost_gateways.wait()

    async def status(self) -> ClusterStatus:
        self.collections += 1
        return ClusterStatus(taken_ms=1, state="healthy")


class Bus:
    """The broker's limit."""

    max_payload_bytes = 1000
    server_info: ClassVar = {"version": "2.12.6"}


def context(gateway: Gateway, allows_changes: bool) -> ConsoleContext:
    return ConsoleContext(
        bus=cast(Any, Bus()),
        view=cast(Any, View()),
        replies=cast(Any, None),
        dead_letters=cast(Any, None),
        observation=cast(Any, None),
        gateway=cast(Any, gateway),
        release="1.2.3",
        broker_url="nats://host:4222",
        allows_changes=allows_changes,
        access_file="/data/nats-url",
    )


def browser(app: Starlette) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


@pytest.fixture
def client(gateway: Gateway) -> httpx.AsyncClient:
    return browser(make_app(context(gateway, True), "127.0.0.1"))


CHANGES = [
    ("POST", "/api/models/a%2Fb%25/load", "POST", "/v2/repository/models/a%2Fb%25/load"),
    ("POST", "/api/models/net/reload", "POST", "/v2/repository/models/net/load"),
    ("POST", "/api/models/net/unload", "POST", "/v2/repository/models/net/unload"),
    ("PUT", "/api/models/net/traffic", "PUT", "/v2/models/net/traffic"),
    ("DELETE", "/api/models/net/traffic", "DELETE", "/v2/models/net/traffic"),
    ("POST", "/api/models/a%2Fb/traffic/ramp", "POST", "/v2/models/a%2Fb/traffic/ramp"),
    ("PUT", "/api/models/net/traffic/shadow", "PUT", "/v2/models/net/traffic/shadow"),
    ("DELETE", "/api/models/net/traffic/shadow", "DELETE", "/v2/models/net/traffic/shadow"),
    ("POST", "/api/models/net/rollback", "POST", "/v2/models/net/rollback"),
    ("POST", "/api/jobs?model=x%26y", "POST", "/v2/jobs?model=x%26y"),
    ("POST", "/api/jobs/batch-1/pause", "POST", "/v2/jobs/batch-1/pause"),
    ("POST", "/api/jobs/batch-1/resume", "POST", "/v2/jobs/batch-1/resume"),
    ("POST", "/api/jobs/batch-1/cancel", "POST", "/v2/jobs/batch-1/cancel"),
    ("POST", "/api/jobs/batch-1/retry", "POST", "/v2/jobs/batch-1/retry"),
    ("DELETE", "/api/jobs/batch-1", "DELETE", "/v2/jobs/batch-1"),
]


@pytest.mark.parametrize(("method", "path", "sent_method", "sent_path"), CHANGES)
async def test_a_change_is_passed_on(
    client: httpx.AsyncClient, gateway: Gateway, method: str, path: str, sent_method: str, sent_path: str
) -> None:
    response = await client.request(
        method, path, content=b"body", headers={**ACT, "Content-Type": "a/b", "Cookie": "c"}
    )
    assert (response.status_code, response.json()) == (200, {"error": "as it is"})
    assert response.headers["retry-after"] == "3"
    assert "x-other" not in response.headers
    assert gateway.requests == [(sent_method, sent_path, b"body", {"content-type": "a/b", "accept": "*/*"})]


@pytest.mark.parametrize(("method", "path"), [change[:2] for change in CHANGES])
async def test_a_change_needs_the_page_s_header_and_the_option(gateway: Gateway, method: str, path: str) -> None:
    changing = browser(make_app(context(gateway, True), "127.0.0.1"))
    refused = await changing.request(method, path)
    assert refused.status_code == 403
    assert "x-weir-console" in refused.json()["error"]
    reading = browser(make_app(context(gateway, False), "127.0.0.1"))
    refused = await reading.request(method, path, headers=ACT)
    assert refused.status_code == 403
    assert "--console-allow-changes" in refused.json()["error"]
    assert gateway.requests == []


async def test_errors_of_the_gateway_and_of_its_absence_are_shown(client: httpx.AsyncClient, gateway: Gateway) -> None:
    response = await client.post("/api/models/bad/load", headers=ACT)
    assert (response.status_code, response.json()) == (400, {"error": "as it is"})
    gateway.is_away = True
    for response in (await client.post("/api/models/net/load", headers=ACT), await client.get("/api/jobs")):
        assert response.status_code == 503
        assert response.json() == {"error": "no gateway is connected to the message broker"}
    assert (await client.get("/api/models")).json()["models"] == [], "the page still shows what the registry knows"


async def test_nothing_waits_for_a_gateway_that_does_not_reply(gateway: Gateway) -> None:
    made = context(gateway, True)
    client = browser(make_app(made, "127.0.0.1"))
    (row,) = (await client.get("/api/models")).json()["models"]
    gateway.is_suspended = True
    cast(Any, made.view).has_gateway = False
    made.view.tick = Tick(2, 6, None)
    made._indexed_s = float("-inf")
    assert (await client.get("/api/models")).json()["models"] == [row], "the repositories are as they were last known"
    requests = [client.post("/api/models/net/load", headers=ACT), client.get("/api/jobs")]
    requests.append(client.post("/api/try/net", headers=ACT, content=b"{}"))
    for response in [await request for request in requests]:
        assert (response.status_code, response.json()) == (503, {"error": NO_GATEWAY})
    details = (await client.get("/api/models/%3Cb%3E%26x")).json()
    assert (details["history"], details["traffic"], details["metadata"]) == (None, None, None)


async def test_a_request_ends_when_the_last_gateway_stops_replying(gateway: Gateway) -> None:
    class Silence:
        async def gather(self, subjects: list[str], *arguments: Any, **options: Any) -> bool:
            asked.set()
            await asyncio.Event().wait()
            return True

    class Observation:
        def watch_id(self, id: str) -> None:
            pass

    asked = asyncio.Event()
    made = replace(context(gateway, False), replies=cast(Any, Silence()), observation=cast(Any, Observation()))
    client = browser(make_app(made, "127.0.0.1"))
    trying = asyncio.create_task(client.post("/api/try/net", headers=ACT, content=b"{}"))
    await asked.wait()
    cast(Any, made.view).lost_gateways.set()
    response = await trying
    assert response.status_code == 503
    assert response.json()["error"].startswith(NO_GATEWAY)


async def test_large_bodies_are_rejected_before_they_are_complete(client: httpx.AsyncClient, gateway: Gateway) -> None:
    response = await client.post("/api/jobs", headers=ACT, content=b"x" * (8 * 1024 * 1024 + 1))
    assert response.status_code == 413
    assert "8388608 bytes" in response.json()["error"]
    response = await client.post("/api/try/net", headers=ACT, content=b"x" * 1001)
    assert response.status_code == 413
    assert "1000 bytes" in response.json()["error"]
    assert gateway.requests == []


async def test_foreign_hosts_and_wrong_parameters_are_rejected(client: httpx.AsyncClient) -> None:
    assert (await client.get("/api/session", headers={"Host": "evil.example.com"})).status_code == 400
    assert (await client.get("/api/session", headers={"Host": "127.0.0.1:8080"})).status_code == 200
    assert "'soon'" in (await client.get("/api/series?since_ms=soon")).json()["error"]
    assert (await client.post("/api/try/net?version=x", headers=ACT, content=b"{}")).status_code == 400
    assert (await client.get("/api/models/unknown")).status_code == 404


@pytest.mark.parametrize("path", ["/api/models", "/api/batching?model=net&after=0", "/api/requests?model=net"])
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_pages_of_other_sites_get_no_data(client: httpx.AsyncClient, path: str, site: str) -> None:
    response = await client.get(path, headers={"Sec-Fetch-Site": site})
    assert (response.status_code, response.json()) == (
        403,
        {"error": f"a request from another site ('{site}') is refused"},
    )
    assert (await client.get("/", headers={"Sec-Fetch-Site": site})).status_code == 200  # a link leads to the page


async def test_known_models_alone_are_observed(gateway: Gateway) -> None:
    class Observation:
        watched: ClassVar[list[str]] = []

        def watch(self, model: str) -> None:
            self.watched.append(model)

        def traces(self, model: str, limit: int) -> list[Any]:
            return []

        def batches(self, model: str, after: int) -> BatchPage:
            return BatchPage(after, 0, [])

    made = replace(context(gateway, False), observation=cast(Any, Observation()))
    client = browser(make_app(made, "127.0.0.1"))
    for model in ("net", "made-up" * 99, ""):
        for path in (f"/api/requests?model={model}", f"/api/batching?model={model}&after=0"):
            response = await client.get(path, headers={"Sec-Fetch-Site": "same-origin"})
            assert response.status_code == (400 if path.startswith("/api/batching?model=&") else 200)
    assert Observation.watched == ["net", "net", ""]


async def test_session_and_models(client: httpx.AsyncClient) -> None:
    session = (await client.get("/api/session")).json()
    assert session["release"] == "1.2.3"
    assert session["allow_changes"]
    assert session["cluster"] == {
        "url": "nats://host:4222",
        "access_file": "/data/nats-url",
        "nats_version": "2.12.6",
        "is_connected": True,
    }
    index = (await client.get("/api/models")).json()
    (row,) = index["models"]
    assert (row["id"], row["state"], row["loaded"], row["requests_per_s"]) == ("<b>&x", "UNAVAILABLE", False, None)
    assert index["control_mode"] == "explicit", "a page can't load models in other modes"


async def test_a_model_that_failed_to_load_has_the_reason(client: httpx.AsyncClient, gateway: Gateway) -> None:
    assert (await client.get("/api/models/%3Cb%3E%26x")).json()["reason"] == "", "it was unloaded"
    gateway.index = b'[{"name": "net", "state": "UNAVAILABLE", "reason": "config.pbtxt:3: no such field"}]'
    other = browser(make_app(context(gateway, True), "127.0.0.1"))
    assert (await other.get("/api/models/net")).json()["reason"] == "config.pbtxt:3: no such field"


async def test_a_model_is_asked_for_by_its_quoted_name(client: httpx.AsyncClient, gateway: Gateway) -> None:
    details = (await client.get("/api/models/%3Cb%3E%26x")).json()
    assert details["history"] == details["traffic"] == {"error": "as it is"}
    asked = {path for _, path, _, _ in gateway.requests}
    assert asked == {"/v2/repository/index", "/v2/models/%3Cb%3E%26x/history", "/v2/models/%3Cb%3E%26x/traffic"}


async def test_the_page_s_files_have_validators_and_a_strict_policy(tmp_path: Path) -> None:
    (tmp_path / "vendor").mkdir()
    (tmp_path / "vendor" / "lib.mjs").write_text("export {}")
    (tmp_path / "index.html").write_text('<!doctype html><script type="importmap">{"imports":{}}</script>')
    client = browser(application(page_routes(tmp_path)))
    page = await client.get("/")
    policy = page.headers["content-security-policy"]
    assert "script-src 'self' 'sha256-" in policy
    assert "unsafe-eval" not in policy
    assert "frame-ancestors 'none'" in policy
    assert (await client.get("/", headers={"If-None-Match": page.headers["etag"]})).status_code == 304
    assert (await client.get("/web/vendor/lib.mjs")).headers["content-type"].startswith("text/javascript")
    for missing in ("/web/none.js", "/web/../settings.py", "/web/%2e%2e/settings.py"):
        assert (await client.get(missing)).status_code == 404


async def test_without_its_libraries_the_page_says_how_to_get_them(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<!doctype html>")
    response = await browser(application(page_routes(tmp_path))).get("/")
    assert response.status_code == 503
    assert "make web" in response.text

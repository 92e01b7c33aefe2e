"""Gateways without one of their features: each can be taken out, and everything else works."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.clients.stock import http_inputs
from tests.support.models.zoo import write_identity
from tests.support.servers.gateway import OwnGateway, own_gateway
from tests.support.servers.weir_server import Server
from weir.bus.nats.connection import Bus
from weir.cluster.observation.observer import Observation
from weir.gateway.main import FEATURES

SETTINGS: dict[str, Any] = {"cache_config": ["local,size=1000000"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("features")
    write_identity(folder / "models", "echo", "INT64", "response_cache { enable: true }")
    started = Server(folder, folder / "models")
    try:
        yield started
        assert started.stop() == 0
        assert "Traceback" not in started.log()
    finally:
        started.close()


def ask(gateway: OwnGateway, number: int, id: str = "") -> None:
    with gateway.http() as client:
        result = client.infer("echo", http_inputs({"IN": np.array([[number]], np.int64)}), request_id=id)
        assert result.as_numpy("OUT") == number


def hits(gateway: OwnGateway) -> float | None:
    """Hits of the cache on the gateway's page; None if the page has no such family."""
    return next(
        (value for (name, _), value in gateway.metrics().items() if name == "nv_cache_num_hits_per_model"), None
    )


def test_the_features_are_those_below() -> None:
    assert {"traffic", "response cache", "observation", "platforms"} == FEATURES


def test_with_all(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/predict")
    monkeypatch.setenv("AIP_HEALTH_ROUTE", "/health")
    with own_gateway(tmp_path, server, **SETTINGS, allow_vertex_ai=True, vertex_ai_port=0) as gateway:
        ask(gateway, 1)
        ask(gateway, 1)
        assert hits(gateway) == 1
        assert gateway.get("/v2/models/echo/traffic")[0] == 200
        assert "weir_version_requests_total" in gateway.metrics_page()
        assert gateway.told["vertex_ai_port"]


def test_without_traffic_there_are_no_rules(server: Server, tmp_path: Path) -> None:
    with own_gateway(tmp_path, server, "traffic", **SETTINGS) as gateway:
        ask(gateway, 2)
        assert gateway.get("/v2/models/echo/traffic")[0] == 404
        assert gateway.get("/v2/models/echo/history")[0] == 200
        page = gateway.metrics_page()
        assert "nv_inference_request_success" in page
        assert "weir_version_" not in page


def test_without_the_response_cache_each_request_is_run(server: Server, tmp_path: Path) -> None:
    with own_gateway(tmp_path, server, "response cache", **SETTINGS) as gateway:
        ask(gateway, 3)
        ask(gateway, 3)
        assert hits(gateway) is None


def test_without_platforms_no_port_is_bound(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/predict")
    monkeypatch.setenv("AIP_HEALTH_ROUTE", "/health")
    with own_gateway(tmp_path, server, "platforms", allow_vertex_ai=True, vertex_ai_port=0) as gateway:
        ask(gateway, 4)
        assert "vertex_ai_port" not in gateway.told


async def test_without_observation_no_request_is_reported(server: Server, tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    (tmp_path / "without").mkdir()
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(server.nats_url, "features-observer", background, role="console")
        observation = Observation(bus, "features-observer")
        await observation.start()
        with (
            own_gateway(tmp_path / "without", server, "observation") as without,
            own_gateway(tmp_path / "all", server) as gateway,
        ):
            observation.watch("echo", traces_per_s=100)
            await asyncio.sleep(0)  # the lease is published
            await bus.flush()
            await asyncio.to_thread(ask, without, 5, "unseen")

            async def is_seen() -> bool:
                # The lease may reach the gateway after a first request.
                await asyncio.to_thread(ask, gateway, 6, "seen")
                return observation.trace("seen") is not None

            while not await is_seen():
                pass
            assert observation.trace("unseen") is None
        observation.close()
        await bus.close()

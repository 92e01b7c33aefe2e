"""Broker credentials are hidden from the code of models and from process listings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.clients.stock import http_inputs
from tests.support.models.zoo import write_python_model
from tests.support.servers import weir_server as serving
from tests.support.servers.nats import GivenNats
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GivenNats]:
    user = {"user": "weir", "password": "of-admin"}
    server = GivenNats(tmp_path_factory.mktemp("broker"), monitor=False, max_payload=8 << 20, authorization=user)
    yield server
    server.stop()


@pytest.mark.parametrize("way", ["url", "variables"])
@pytest.mark.timeout(90)
def test_a_model_sees_no_password(nats: GivenNats, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_python_model(tmp_path / "models", "prying", "prying", {"IN": ("INT32", [1])}, {"OUT": ("STRING", [1])}, 1)
    place = nats.url.removeprefix("nats://")
    url = f"nats://weir:of-admin@{place}" if way == "url" else nats.url
    given = {} if way == "url" else {"WEIR_NATS_USER": "weir", "WEIR_NATS_PASSWORD": "of-admin"}
    clean = serving.clean_environment
    monkeypatch.setattr(serving, "clean_environment", lambda folder: {**clean(folder), **given})
    server = Server(tmp_path, tmp_path / "models", f"--nats={url}")
    try:
        with server.http() as client:
            one = {"IN": np.zeros((1, 1), np.int32)}
            [[reply]] = client.infer("prying", http_inputs(one)).as_numpy("OUT")
        names, seen = json.loads(reply)
        assert not [name for name in names if name.startswith(("WEIR_", "NATS_"))]
        assert [text for text in seen if "weir" in text], "the model could read nothing of those above it"
        assert not [text for text in seen if "of-admin" in text]
        for process in server.processes():
            folder = Path("/proc", str(process.pid))
            assert b"of-admin" not in (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        # A role that comes back is let in as the one before.
        server.kill("worker")
        wait_until(lambda: "worker" in server.pids() and server.is_ready("prying"))
    finally:
        assert server.stop() == 0

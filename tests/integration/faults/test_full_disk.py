"""A nats-server that finds no room on its disk: its supervisor starts it again, and nothing that was accepted is lost."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.zoo import write_identity
from tests.support.servers.full_disk import FREE_BYTES, full_disk
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    write_identity(tmp_path / "models", "identity", "FP32", "dynamic_batching { }")
    with Server(tmp_path, tmp_path / "models") as started:
        yield started


def ask(server: Server, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(f"http://{server.http_place}{path}", body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def accepted(server: Server, values: int) -> str | None:
    data = [[1.5] * values]
    body = json.dumps({"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, values], "data": data}]}).encode()
    status, answer = ask(server, "POST", "/v2/models/identity/infer", body, Prefer="respond-async")
    if status == 202:
        return str(answer["id"])
    assert status == 503, answer
    assert "broker" in answer["error"] or "could not be stored" in answer["error"]
    return None


def test_what_was_accepted_ends_after_the_disk_was_full(server: Server) -> None:
    ids = [accepted(server, 4) for _ in range(5)]
    pid = server.pids()["nats"]
    with full_disk(pid, server.folder / "data"):
        wait_until(
            lambda: ids.append(accepted(server, FREE_BYTES)) or "nats-server can't store messages" in server.log()
        )
        # Its volume has room, and the limit is that of the process: it is started again at once.
        wait_until(lambda: server.pids().get("nats", pid) != pid)
    ids.append(str(wait_until(lambda: accepted(server, 4))))
    for id in filter(None, ids):
        wait_until(lambda id=id: ask(server, "GET", f"/v2/jobs/{id}")[1]["status"] == "succeeded")  # type: ignore[misc]
    assert "MiB free: restarting it" in server.log()

"""What a client changes at one gateway is in effect at the others when it has the response."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.support.clients.shared_memory import memory
from tests.support.clients.stock import Answer, RawConnection, infer_body, post
from tests.support.models.zoo import write_identity
from tests.support.servers.several_gateways import connect, processes_of
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

VALUE = np.arange(4, dtype=np.float32).reshape(1, 4)
ROUNDS = 10


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two gateways whose models are loaded on request."""
    folder = tmp_path_factory.mktemp("shared")
    for name in ("loaded", "asked"):
        write_identity(folder / "models", name, "FP32")
    (folder / "files").mkdir()
    with Server(
        folder,
        folder / "models",
        "--gateways=2",
        "--workers=2",
        "--model-control-mode=explicit",
        "--load-model=loaded",
        "--allow-client-shm",
        f"--batch-root={folder / 'files'}",
    ) as server:
        yield server


@pytest.fixture
def both(shared: Server) -> Iterator[tuple[RawConnection, RawConnection]]:
    """A connection to each gateway."""
    first, second = processes_of(shared, "gateway")
    with connect(shared, first) as one, connect(shared, second) as other:
        yield one, other


def answered(connection: RawConnection, request: bytes) -> Answer:
    answer = connection.ask(request)
    assert answer is not None
    return answer


def changed(connection: RawConnection, path: str, **fields: Any) -> Answer:
    """The successful response to a change."""
    answer = answered(connection, post(path, json.dumps(fields).encode()))
    assert answer.status in (200, 202), answer.body
    return answer


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def infer(model: str) -> bytes:
    return post(f"/v2/models/{model}/infer", infer_body({"IN": VALUE}))


def infer_in_region(region: str) -> bytes:
    where = {"shared_memory_region": region, "shared_memory_byte_size": VALUE.nbytes}
    tensor = {"name": "IN", "shape": [1, 4], "datatype": "FP32", "parameters": where}
    return post("/v2/models/loaded/infer", json.dumps({"inputs": [tensor]}).encode())


def test_a_region(both: tuple[RawConnection, RawConnection]) -> None:
    one, other = both
    with memory(VALUE.nbytes) as made:
        made.put(VALUE.tobytes())
        for number in range(ROUNDS):
            path = f"/v2/systemsharedmemory/region/r{number}"
            changed(one, f"{path}/register", key=made.key, offset=0, byte_size=VALUE.nbytes)
            answer = answered(other, infer_in_region(f"r{number}"))
            assert answer.document["outputs"][0]["data"] == VALUE.ravel().tolist()
            changed(one, f"{path}/unregister")
            assert answered(other, infer_in_region(f"r{number}")).status != 200
            one, other = other, one


def test_a_model(both: tuple[RawConnection, RawConnection]) -> None:
    one, other = both
    for _ in range(ROUNDS):
        changed(one, "/v2/repository/models/asked/load")
        assert answered(other, infer("asked")).status == 200
        changed(one, "/v2/repository/models/asked/unload")
        assert answered(other, get("/v2/models/asked/ready")).status == 400
        one, other = other, one


@pytest.mark.parametrize(("path", "name"), [("/v2/logging", "log_verbose_level"), ("/v2/trace/setting", "trace_rate")])
def test_a_setting(both: tuple[RawConnection, RawConnection], path: str, name: str) -> None:
    one, other = both
    for number in range(1, ROUNDS):
        changed(one, path, **{name: number if path == "/v2/logging" else str(number)})
        assert str(answered(other, get(path)).document[name]) == str(number)
        one, other = other, one
    changed(one, path, **{name: 0 if path == "/v2/logging" else "1000"})


def has_succeeded(connection: RawConnection, job: str) -> bool:
    return bool(answered(connection, get(job)).document["state"] == "succeeded")


def test_a_job(shared: Server, both: tuple[RawConnection, RawConnection]) -> None:
    one, other = both
    (shared.folder / "files" / "items.jsonl").write_text(json.dumps({"IN": VALUE.ravel().tolist()}) + "\n")
    for number in range(3):
        spec = {"model": "loaded", "input": str(shared.folder / "files" / "items.jsonl")}
        job = changed(one, "/v2/jobs", **spec, output=str(shared.folder / "files" / f"out{number}")).document
        assert answered(other, get(f"/v2/jobs/{job['id']}")).document["id"] == job["id"]
        path = f"/v2/jobs/{job['id']}"
        wait_until(partial(has_succeeded, other, path))
        deletion = f"DELETE {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        assert answered(other, deletion).status == 204
        assert answered(one, get(path)).status == 404
        one, other = other, one


def is_answered(connection: RawConnection) -> bool:
    return bool(select.select([connection.socket], [], [], 0)[0])


@pytest.mark.parametrize(
    ("change", "undo", "look", "is_changed"),
    [
        (
            lambda key: post(
                "/v2/systemsharedmemory/region/late/register",
                json.dumps({"key": key, "offset": 0, "byte_size": VALUE.nbytes}).encode(),
            ),
            post("/v2/systemsharedmemory/region/late/unregister", b"{}"),
            get("/v2/systemsharedmemory/status"),
            lambda answer: b"late" in answer.body,
        ),
        (
            lambda _key: post("/v2/logging", b'{"log_verbose_level": 9}'),
            post("/v2/logging", b'{"log_verbose_level": 0}'),
            get("/v2/logging"),
            lambda answer: answer.document["log_verbose_level"] == 9,
        ),
    ],
    ids=["a region", "a setting"],
)
def test_the_response_waits_for_a_gateway_that_stands_still(
    shared: Server,
    change: Callable[[str], bytes],
    undo: bytes,
    look: bytes,
    is_changed: Callable[[Answer], bool],
) -> None:
    first, second = processes_of(shared, "gateway")
    with (
        memory(VALUE.nbytes) as made,
        connect(shared, first) as changing,
        connect(shared, first) as looking,
        connect(shared, second) as other,
    ):
        os.kill(second, signal.SIGSTOP)
        try:
            changing.send(change(made.key))
            wait_until(lambda: is_changed(answered(looking, look)))
            assert not is_answered(changing)
        finally:
            os.kill(second, signal.SIGCONT)
        answer = changing.answer()
        assert answer is not None
        assert answer.status == 200
        assert is_changed(answered(other, look))
        assert answered(changing, undo).status == 200
        assert not is_changed(answered(other, look))


def test_a_dead_gateway_delays_a_change_by_a_second_at_most(shared: Server) -> None:
    first, second = processes_of(shared, "gateway")
    with connect(shared, first) as connection:
        os.kill(second, signal.SIGKILL)
        changed(connection, "/v2/logging", log_verbose_level=0)
    wait_until(lambda: len(pids := processes_of(shared, "gateway")) == 2 and second not in pids)
    shared.wait_ready("loaded")

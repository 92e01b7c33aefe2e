"""Thousands of mutated requests: the server survives, and every valid request among them gets its correct response.

A 500 is allowed only with Triton's text for unreadable JSON.
"""

from __future__ import annotations

import re
import signal
from collections import Counter, deque
from collections.abc import Iterator

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc

from tests.support.clients.mutations import grpc_requests, http_requests
from tests.support.clients.stock import Answer, RawConnection, grpc_inputs
from tests.support.models.zoo import write_identity
from tests.support.servers.weir_server import Server

ROUND = 200
"""Damaged requests between two good ones."""

_TRITONS_500 = re.compile(
    r"Unable to|failed to|attempt to (access|get members)|JSON nesting|unexpected error on creating Triton parameter|"
    r"invalid type|Expected JSON object|shared memory size"
)
_STATUSES = {200, 400, 404, 405, 415, 500, 501, 503}
_UNEXPECTED = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.DEADLINE_EXCEEDED}


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fuzzed")
    (models := folder / "models").mkdir()
    write_identity(models, "identity", "FP32", "dynamic_batching { }")
    started = Server(folder, models)
    try:
        yield started
        assert started.stop(signal.SIGTERM) == 0
    finally:
        started.close()


def good_answer(client: tritonclient.grpc.InferenceServerClient, number: float) -> None:
    sent = np.array([[number, -number, 0.5]], np.float32)
    answer = client.infer("identity", grpc_inputs({"IN": sent}), client_timeout=20).as_numpy("OUT")
    assert np.array_equal(answer, sent)


class Health:
    """What must not change while a server is being fuzzed."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.pids = server.pids()
        self.files = self._files()

    def check(self) -> None:
        assert self.server.pids() == self.pids, "a role has died"
        assert self.server.in_flight() == 0
        assert self._files() <= self.files + 20, "files leak"
        assert "Traceback" not in self.server.log()

    def _files(self) -> int:
        return sum(psutil.Process(pid).num_fds() for role, pid in self.pids.items() if role != "nats")


def fuzz_http(server: Server, seed: int, count: int) -> Counter[int]:
    """Sends damaged requests in pipelines; the statuses they were answered with."""
    statuses: Counter[int] = Counter()
    requests = http_requests(seed, count)
    with server.grpc() as client:
        connection = RawConnection(server.port, 20)
        sent: deque[bytes] = deque()
        for number, request in enumerate(requests):
            try:
                connection.send(request.data)
            except OSError:  # the server has hung up on what came before
                connection.close()
                connection = RawConnection(server.port, 20)
                sent.clear()
                connection.send(request.data)
            sent.append(request.data)
            answer = connection.answer()
            if answer is None or answer.headers.get("connection") == "close":
                connection.close()
                connection = RawConnection(server.port, 20)
            if answer is not None:
                check_http(answer, request.data)
                statuses[answer.status] += 1
            if number % ROUND == 0:
                good_answer(client, number)
        connection.close()
    return statuses


def check_http(answer: Answer, request: bytes) -> None:
    assert answer.status in _STATUSES, (answer, request)
    if answer.status == 500:
        assert _TRITONS_500.search(answer.body.decode()), (answer, request)


def fuzz_grpc(server: Server, seed: int, count: int) -> Counter[str]:
    """Sends damaged messages, 32 at a time; the codes they were answered with."""
    codes: Counter[str] = Counter()
    with server.grpc() as client, grpc.insecure_channel(server.grpc_place) as channel:
        calls = {}
        waiting: deque[tuple[grpc.Future, bytes]] = deque()
        for number, (method, data) in enumerate(grpc_requests(seed, count)):
            if method not in calls:
                calls[method] = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            waiting.append((calls[method].future(data, timeout=30), data))
            if len(waiting) >= 32:
                codes[code_of(*waiting.popleft())] += 1
            if number % ROUND == 0:
                good_answer(client, number)
        while waiting:
            codes[code_of(*waiting.popleft())] += 1
    return codes


def code_of(call: grpc.Future, data: bytes) -> str:
    error = call.exception()
    if error is None:
        return "OK"
    assert error.code() not in _UNEXPECTED, (error.details(), data)
    if error.code() is grpc.StatusCode.INTERNAL:
        assert _TRITONS_500.search(error.details()), (error.details(), data)
    return str(error.code().name)


def test_damaged_http_requests(fuzzed: Server) -> None:
    health = Health(fuzzed)
    statuses = fuzz_http(fuzzed, 1, 3000)
    health.check()
    assert {200, 400, 404, 500} <= statuses.keys()


def test_damaged_grpc_requests(fuzzed: Server) -> None:
    health = Health(fuzzed)
    codes = fuzz_grpc(fuzzed, 2, 3000)
    health.check()
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND"} <= codes.keys()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_hundred_thousand_damaged_requests(fuzzed: Server, record_property: object) -> None:
    health = Health(fuzzed)
    roles = [psutil.Process(pid) for pid in fuzzed.pids().values()]
    before = {role.pid: role.memory_info().rss for role in roles}
    statuses = fuzz_http(fuzzed, 11, 60_000)
    codes = fuzz_grpc(fuzzed, 12, 50_000)
    health.check()
    grown = {role.name(): (role.memory_info().rss - before[role.pid]) >> 20 for role in roles}
    print(f"HTTP {dict(statuses)}, gRPC {dict(codes)}, grown by MiB {grown}")
    assert max(grown.values()) < 200

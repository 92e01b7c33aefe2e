"""Roles on several hosts: large tensors are fetched from their owners, and refused where those do not listen."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from onnx import helper
from tritonclient.utils import InferenceServerException

from tests.support.clients.stock import http_inputs
from tests.support.models.ensembles import Step, write_ensemble
from tests.support.models.zoo import config_text, write_graph, write_identity, write_model
from tests.support.servers.endpoints import Endpoints
from tests.support.servers.nats import GivenNats, make_certificates
from tests.support.servers.roles import RoleProcess, Start
from tests.support.waiting import wait_until
from weir.bus.naming.identity import new_id
from weir.bus.nats.access import BrokerAccess, BrokerRefused
from weir.bus.nats.connection import Bus
from weir.bus.nats.remote_links import listen_for_links
from weir.bus.payloads.arena import PayloadArena
from weir.bus.payloads.fetch_plan import Outcome
from weir.bus.payloads.fetcher import PayloadFetcher
from weir.bus.payloads.server import PayloadServer

LARGE = np.random.default_rng(7).random((1, 1_500_000), np.float32)
WIDTH = 1_200_000
LISTENS = "--payload-listen=127.0.0.1"


class Hosts(Start):
    """A gateway on this host, and a worker with the model `far` on another; both listen."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        write_identity(folder / "models", "far", "FP32")
        self("scheduler")
        self.away = self.start_away()
        self.served = self.gateway(LISTENS)
        wait_until(lambda: self.served.is_ready("far"))

    def start_away(self) -> RoleProcess:
        return self.worker(LISTENS, host="another")

    def fetched_bytes(self) -> float:
        """What gateway and workers have fetched."""
        page = self.served.metrics_page()
        return sum(float(line.split()[-1]) for line in page.splitlines() if 'payload_fetched_bytes{way="tcp"}' in line)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    starting = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        yield starting
        starting.end_all()
    finally:
        starting.close()


def _write_wide(models: Path) -> None:
    """Model `wide`, whose output is larger than a message, as its configuration says."""
    tensors = {"IN": ("FP32", [WIDTH])}, {"OUT": ("FP32", [WIDTH])}
    folder = write_model(models, "wide", config_text("wide", "onnxruntime", *tensors, 8))
    ends = {"IN": ("FP32", [-1, WIDTH])}, {"OUT": ("FP32", [-1, WIDTH])}
    write_graph(folder / "1" / "model.onnx", [helper.make_node("Identity", ["IN"], ["OUT"])], *ends)


def _echo(served: Endpoints) -> None:
    with served.http() as client:
        output = client.infer("far", http_inputs({"IN": LARGE})).as_numpy("OUT")
    assert output is not None
    assert np.array_equal(output, LARGE)


@pytest.mark.timeout(120)
def test_large_tensors_are_fetched_both_ways(hosts: Hosts) -> None:
    before = hosts.fetched_bytes()
    for _ in range(3):
        _echo(hosts.served)
    wait_until(lambda: hosts.fetched_bytes() == before + 3 * 2 * LARGE.nbytes)
    page = hosts.served.metrics_page()
    assert "weir_gateway_payload_readers_refused 0" in page
    assert "weir_worker_payload_readers_refused 0" in page


@pytest.mark.timeout(120)
def test_a_worker_that_dies_in_the_midst_of_fetching_and_sending_costs_no_request(hosts: Hosts) -> None:
    asking = [threading.Thread(target=lambda: [_echo(hosts.served) for _ in range(3)]) for _ in range(3)]
    before = hosts.fetched_bytes()
    failed: list[object] = []
    threading.excepthook, hook = failed.append, threading.excepthook
    try:
        for thread in asking:
            thread.start()
        wait_until(lambda: hosts.fetched_bytes() > before)
        hosts.away.end(signal.SIGKILL)
        hosts.away = hosts.start_away()
        for thread in asking:
            thread.join(60)
    finally:
        threading.excepthook = hook
    assert not failed
    _echo(hosts.served)


@pytest.mark.timeout(120)
def test_without_addresses_what_no_message_carries_is_refused(tmp_path: Path) -> None:
    medium = LARGE[:, : (3 << 20) // 4]  # fits a message of the broker
    with closing(Start(tmp_path)) as starting:
        write_identity(tmp_path / "models", "far", "FP32")
        _write_wide(tmp_path / "models")
        steps: list[Step] = [("far", {"IN": "IN"}, {"OUT": "M"}), ("far", {"IN": "M"}, {"OUT": "OUT"})]
        write_ensemble(tmp_path / "models", "twice", {"IN": ("FP32", [-1])}, {"OUT": ("FP32", [-1])}, steps, 8)
        starting("scheduler")
        starting.worker(host="another")
        served, near = starting.gateway("--strict-readiness=false"), starting.gateway(host="another")
        wait_until(lambda: served.is_ready("far") and served.is_ready("twice") and near.is_ready("wide"))
        with served.http() as client:
            for model in ("far", "twice"):
                output = client.infer(model, http_inputs({"IN": medium})).as_numpy("OUT")
                assert output is not None
                assert np.array_equal(output, medium)
            with pytest.raises(InferenceServerException, match="--payload-listen in this process"):
                client.infer("far", http_inputs({"IN": np.repeat(LARGE, 2, axis=1)}))
            with pytest.raises(InferenceServerException, match="its worker has no --payload-listen"):
                client.infer("far", http_inputs({"IN": LARGE}))
            (row,) = [row for row in client.get_model_repository_index() if row["name"] == "wide"]
            assert row["state"] == "UNAVAILABLE"
            assert "its worker needs --payload-listen" in row["reason"]
        with near.http() as client:
            output = client.infer("wide", http_inputs({"IN": LARGE[:, :WIDTH]})).as_numpy("OUT")
            assert output is not None
            assert np.array_equal(output, LARGE[:, :WIDTH])
        starting.end_all()


@pytest.mark.timeout(60)
def test_a_role_that_can_t_listen_says_so_and_does_not_start(hosts: Hosts) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(AssertionError, match=f"--payload-listen=127.0.0.1:{taken.getsockname()[1]}"):
            hosts.worker(f"--payload-listen=127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.timeout(60)
async def test_who_speaks_to_the_broker_encrypted_does_so_to_owners(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path)
    files = {"cert_file": str(folder / "server.pem"), "key_file": str(folder / "server.key")}
    server = GivenNats(tmp_path / "nats", monitor=False, tls=files)
    ca = str(folder / "ca.pem")
    access = BrokerAccess(ca=ca, cert=str(folder / "client.pem"), key=str(folder / "client.key"))
    owner, reader = new_id("gateway"), new_id("worker")
    arena = PayloadArena(owner)
    try:
        async with asyncio.TaskGroup() as background:
            buses = [await Bus.connect(server.url, name, background, access=access) for name in (owner, reader)]
            listener = await listen_for_links(buses[0], "0.0.0.0")
            await PayloadServer(buses[0], owner, listener).start()
            fetcher = PayloadFetcher(buses[1], reader)
            await fetcher.start(background)
            slot = arena.allocate(LARGE.nbytes)
            assert listener is not None
            assert slot is not None
            slot.view[:] = LARGE.tobytes()
            came: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
            fetcher.fetch(slot.ref(), came.set_result)
            async with asyncio.timeout(30):
                outcome = await came
            assert isinstance(outcome, (bytes, memoryview))
            assert bytes(outcome) == LARGE.tobytes()
            plain = await Bus.connect(server.url, "plain", background, access=BrokerAccess(ca=ca))
            with pytest.raises(BrokerRefused, match="--nats-cert and --nats-key"):
                await listen_for_links(plain, "127.0.0.1")
            fetcher.close()
            listener.close()
            for bus in (*buses, plain):
                await bus.close()
    finally:
        arena.close()
        server.stop()

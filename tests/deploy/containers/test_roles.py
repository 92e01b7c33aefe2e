"""`roles.yaml` on an engine, under load: each role is stopped, killed and scaled, and then all containers are replaced."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.support.clients.producers import int64_body, producer
from tests.support.clients.request_ledger import Ledger
from tests.support.clients.stock import http_inputs
from tests.support.deploy.compose_project import example_environment
from tests.support.deploy.container_engine import Engine
from tests.support.deploy.container_project import Container, ContainerProject, started
from tests.support.servers.endpoints import Endpoints
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]

Report = Callable[[str], None]


@pytest.fixture(scope="module")
def roles(engine: Engine, models: Path, report: Report) -> Iterator[ContainerProject]:
    began_s = time.monotonic()
    with started(engine, "roles apart", models) as project:
        report(f"roles: all healthy after {time.monotonic() - began_s:.0f} s")
        yield project


@pytest.fixture(scope="module")
def door(roles: ContainerProject) -> Endpoints:
    """The addresses before the gateways."""
    (container,) = roles.of("door")
    server = Endpoints(container.published(8000), container.published(8001), "")
    wait_until(lambda: server.is_ready("fast") and server.is_ready("slow"), 60)
    return server


def gateway_endpoints(container: Container) -> Endpoints:
    """A gateway itself, behind the door."""
    return Endpoints(*(f"{container.address}:{port}" for port in (8000, 8001, 8002)))


class Durable:
    """A thread that publishes durable requests through `nats` as the user for producers, until it is ended."""

    def __init__(self, roles: ContainerProject, tag: str) -> None:
        password = example_environment()["WEIR_PRODUCER_PASSWORD"]
        servers = [one for name in ("nats-1", "nats-2", "nats-3") for one in roles.of(name)]
        self._url = ",".join(f"nats://weir-producer:{password}@{one.address}:4222" for one in servers)
        self._tag = tag
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._publish()), daemon=True)
        self.stored: list[str] = []
        self.outcomes: dict[str, str] = {}

    @contextmanager
    def publishing(self) -> Iterator[Durable]:
        """Publishes within the context; at its end waits for the record of every request."""
        self._thread.start()
        try:
            yield self
        finally:
            self._is_over.set()
            self._thread.join(120)
        assert not self._thread.is_alive()

    async def _publish(self) -> None:
        async with producer(self._url) as connected:
            while not self._is_over.is_set():
                id = f"{self._tag}-{len(self.stored)}"
                await connected.send("event.fast", int64_body(len(self.stored)), Nats_Msg_Id=id)
                self.stored.append(id)
                await asyncio.sleep(0.05)
            for id in self.stored:
                headers, _ = await connected.record("fast", id)
                self.outcomes[id] = headers["Weir-Outcome"]


@contextmanager
def under_load(roles: ContainerProject, door: Endpoints, tag: str) -> Iterator[Ledger]:
    """Live requests over HTTP and gRPC through the door, and durable ones through nats. None may be lost or fail."""
    ledger, durable = Ledger(door, threads=8), Durable(roles, tag)
    with durable.publishing(), ledger.sending():
        ledger.wait_for_answers(time.monotonic())
        yield ledger
        ledger.wait_for_answers(time.monotonic())
    assert ledger.unanswered == 0
    assert set(durable.outcomes.values()) == {"succeeded"}
    assert len(durable.outcomes) == len(durable.stored) > 0


def replace(roles: ContainerProject, service: str, changes: dict[str, str] | None = None) -> None:
    """Each container of a service by a new one, which is healthy before the old one is stopped."""
    for old in roles.of(service):
        new = roles.add(service, **(changes or {}))
        new.wait_well()
        if service == "gateway":
            wait_until(lambda new=new: gateway_endpoints(new).is_ready("fast"), 60)
        code, took_s = old.stop()
        assert code == 0, f"{old.name}: {code} after {took_s:.1f} s\n{old.logs()}"
        roles.remove(old)


def test_gateways_answer_alike_by_reference_and_by_value(roles: ContainerProject, door: Endpoints) -> None:
    for container in roles.of("gateway"):
        server = gateway_endpoints(container)
        with server.http() as http:
            for values in (np.arange(4), np.arange(300_000)):
                answer = http.infer("fast", http_inputs({"IN": values.reshape(1, -1)}))
                np.testing.assert_array_equal(answer.as_numpy("OUT"), values.reshape(1, -1))
        assert server.metrics()["weir_gateway_requests", ""] >= 2


def test_roles_are_weak(roles: ContainerProject) -> None:
    for service in ("nats-1", "scheduler", "worker", "gateway", "door"):
        for container in roles.of(service):
            code, status = container.run("cat", "/proc/1/status")
            assert code == 0, status
            fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            assert fields["CapEff"] == fields["CapBnd"] == "0" * 16, service
            assert fields["NoNewPrivs"] == "1", service
            assert fields["Seccomp"] == "2", service
            assert fields["Uid"].split()[0] != "0", service
            assert container.run("sh", "-c", "echo x > /x")[0] != 0, service
            limit = container.inspect()["HostConfig"]["Memory"]
            described = roles.project.services[service].get("deploy", {}).get("resources", {}).get("limits", {})
            assert bool(limit) == ("memory" in described), service


def test_passwords_are_not_to_be_read(roles: ContainerProject) -> None:
    """Roles remove theirs from their environment, which a model could read."""
    passwords = example_environment().values()
    for service in ("scheduler", "worker", "gateway"):
        (container, *_) = roles.of(service)
        code, text = container.run(
            "sh", "-c", "for i in /proc/[0-9]*; do [ $i = /proc/1 ] || tr '\\0' '\\n' < $i/environ; done"
        )
        assert code == 0
        ours = [line for line in text.splitlines() if "HOSTNAME" not in line]
        assert ours
        # The container's init process and this very command have what the engine gave them.
        assert [word for word in passwords if text.count(word) > 2] == [], service


def test_an_administrator_asks_from_within_the_network(roles: ContainerProject, door: Endpoints) -> None:
    """As docs/operations.md shows: `docker compose run --rm --no-deps --env ... scheduler status`."""
    password = example_environment()["WEIR_ADMIN_PASSWORD"]
    environment = dict(roles.project.services["scheduler"]["environment"])
    environment |= {"WEIR_NATS_USER": "weir-admin", "WEIR_NATS_PASSWORD": password}
    once = roles.add("scheduler", command=["status"], environment=environment, restart="no")
    wait_until(lambda: not once.state["Running"])
    text = once.logs()
    assert once.state["ExitCode"] == 0, text
    assert "worker" in text
    roles.remove(once)


def test_large_requests_do_not_exhaust_a_gateway(roles: ContainerProject, report: Report) -> None:
    """100 of 15 MB at one gateway, 50 at a time: some may be rejected, and none ends it. Its limit is 2 GB."""
    gateway = roles.of("gateway")[0]
    server, values = gateway_endpoints(gateway), np.arange(1_900_000).reshape(1, -1)

    def ask(_: int) -> str:
        with server.http(timeout_s=60) as http:
            try:
                answer = http.infer("fast", http_inputs({"IN": values})).as_numpy("OUT")
            except InferenceServerException as error:
                return str(error.status() or error.message())
        return "answered" if np.array_equal(answer, values) else "wrong"

    began_s = time.monotonic()
    with ThreadPoolExecutor(50) as pool:
        outcomes = Counter(pool.map(ask, range(100)))
    assert outcomes["answered"] > 0
    assert outcomes.keys() <= {"answered", "503", "429"}
    state = gateway.inspect()
    assert (state["State"]["OOMKilled"], state["RestartCount"]) == (False, 0)
    report(f"roles: 100 requests of 15 MB in {time.monotonic() - began_s:.0f} s: {dict(outcomes)}")


@pytest.mark.parametrize("service", ["worker", "scheduler", "gateway"])
def test_a_role_is_stopped_and_started_under_load(
    roles: ContainerProject, door: Endpoints, service: str, report: Report
) -> None:
    with under_load(roles, door, f"stop-{service}") as ledger:
        container = roles.of(service)[0]
        code, took_s = container.stop()
        assert code == 0, container.logs()
        ledger.wait_for_answers(time.monotonic())
        container.start()
        container.wait_well()
    assert ledger.faults == []
    report(ledger.summary(f"roles: a {service} stopped ({took_s:.1f} s) and started", 1, []))


@pytest.mark.parametrize("service", ["worker", "scheduler", "gateway"])
def test_a_role_crashes_under_load(roles: ContainerProject, door: Endpoints, service: str, report: Report) -> None:
    with under_load(roles, door, f"crash-{service}") as ledger:
        container = roles.of(service)[0]
        starts = container.inspect()["RestartCount"]
        began_s = time.monotonic()
        container.crash()
        recovered_s = ledger.wait_for_answers(began_s)
        wait_until(lambda: container.inspect()["RestartCount"] > starts)
        container.wait_well()
    # What was on a killed gateway's connections fails there, and is its clients' to send again.
    assert ledger.faults == [] or service == "gateway"
    assert [fault for fault in ledger.faults if fault.startswith("wrong")] == []
    assert len(ledger.faults) < 20
    report(ledger.summary(f"roles: a {service} killed", 1, [recovered_s]))


def test_a_nats_server_is_killed_under_load(roles: ContainerProject, door: Endpoints, report: Report) -> None:
    with under_load(roles, door, "kill-nats") as ledger:
        (container,) = roles.of("nats-3")
        began_s = time.monotonic()
        container.kill()
        recovered_s = ledger.wait_for_answers(began_s)
        container.start()
        container.wait_well()
    assert ledger.faults == []
    report(ledger.summary("roles: a nats-server killed", 1, [recovered_s]))


def test_roles_are_scaled_under_load(roles: ContainerProject, door: Endpoints, report: Report) -> None:
    with under_load(roles, door, "scale") as ledger:
        for service in ("worker", "gateway"):
            more = roles.add(service)
            more.wait_well()
        for container in (roles.of("worker")[0], roles.of("gateway")[0]):
            code, _ = container.stop()
            assert code == 0, container.logs()
            roles.remove(container)
    assert ledger.faults == []
    assert len(roles.of("worker")) == len(roles.of("gateway")) == 2
    report(ledger.summary("roles: one more worker and gateway, then one less", 4, []))


def test_all_is_replaced_under_load(roles: ContainerProject, door: Endpoints, report: Report) -> None:
    """The rolling upgrade of docs/operations.md, in its order: nats-servers, gateways, schedulers, workers."""
    with under_load(roles, door, "upgrade") as ledger:
        for name in ("nats-1", "nats-2", "nats-3"):
            (server,) = roles.of(name)
            server.stop()
            server.start()
            server.wait_well()
        for service in ("gateway", "scheduler", "worker"):
            replace(roles, service)
    assert ledger.faults == []
    report(ledger.summary("roles: everything replaced", 9, []))


def test_all_of_it_ends_in_order_and_leaves_volumes_alone(
    roles: ContainerProject, engine: Engine, report: Report
) -> None:
    assert [
        one.name for name in ("scheduler", "worker", "gateway") for one in roles.of(name) if one.state["OOMKilled"]
    ] == []
    ended = roles.stop_all()
    for service in ("scheduler", "worker", "gateway"):
        assert {code for code, _ in ended[service]} == {0}, service
    longest_s = max(took_s for stops in ended.values() for _, took_s in stops)
    report(f"roles: ended, the slowest after {longest_s:.1f} s; door: exit code {ended['door'][0][0]}")
    roles.close()
    wanted = '{"label": ["weir.tests=' + roles.name + '"]}'
    assert engine.ask("GET", "/containers/json", all=True, filters=wanted) == []
    assert engine.ask("GET", "/networks", filters=wanted) == []
    assert not engine.ask("GET", "/volumes", filters=wanted)["Volumes"]

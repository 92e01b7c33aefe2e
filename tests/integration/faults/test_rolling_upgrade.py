"""Each process of a cluster is replaced by one of another version under load, and back again: no request fails.

`WEIR_VERSION_BEFORE` names an installation of the version before (CONTRIBUTING.md): a virtual environment, or a checkout
with one. Without it the test is skipped. Every order of the roles is tried, so that each message travels between both
versions in both directions.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.support.clients.producers import int64_body, producer, value_of
from tests.support.clients.request_ledger import Ledger
from tests.support.clients.request_loop import Ask, RequestLoop
from tests.support.clients.sequence_ledger import SequenceLedger
from tests.support.clients.stock import grpc_inputs, http_inputs
from tests.support.models.ensembles import write_ledger_ensembles
from tests.support.models.sequences import write_checkpointed
from tests.support.models.zoo import write_identity
from tests.support.servers.endpoints import Endpoints
from tests.support.servers.free_ports import free_port
from tests.support.servers.nats import PermittedNats
from tests.support.servers.versions import Installation, VersionedRole, this_version, version_before
from tests.support.waiting import wait_until
from weir.bus.naming.permissions import nats_conf

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

ORDER = ("gateway", "scheduler", "worker", "durable")
"""The order of docs/operations.md."""

COUNTS = {"gateway": 2, "scheduler": 2, "worker": 2, "durable": 1}

LARGE_VALUES = 60_000
"""Values of the tensor of a large request: beyond what travels inside messages."""

MALFORMED = re.compile(r"^.*(?:not an? [A-Z]\w+|malformed).*$", re.MULTILINE)
"""What a role logs of a message that it does not understand."""


@pytest.fixture(scope="module")
def before() -> Installation:
    found = version_before()
    if isinstance(found, str):
        pytest.skip(found)
    return found


class MixedCluster:
    """A cluster on two hosts, whose processes are replaced one by one, each by one of a given version.

    Processes with the same position in their role are on the same host: they use links and shared memory, the others
    nats-server and TCP. The broker has the users of this version, which an operator updates first.
    """

    def __init__(self, folder: Path, installation: Installation) -> None:
        self._folder = folder
        self._ports = free_port(), free_port()
        self._stopped: list[VersionedRole] = []
        self.nats = PermittedNats(folder / "nats", nats_conf())
        self.roles: dict[str, list[VersionedRole]] = {role: [] for role in ORDER}
        for role in ("scheduler", "worker", "durable", "gateway"):
            for _ in range(COUNTS[role]):
                self.roles[role].append(self._start(role, len(self.roles[role]), installation))
        self.door = Endpoints(f"127.0.0.1:{self._ports[0]}", f"127.0.0.1:{self._ports[1]}", "")

    def _start(self, role: str, position: int, installation: Installation) -> VersionedRole:
        traces = (f"--trace-config=triton,file={self._folder / 'traces'}", "--trace-config=level=TIMESTAMPS")
        traced = (*traces, "--trace-config=rate=3", "--trace-config=count=-1")
        fetched = ("--payload-listen=127.0.0.1",)
        options = {
            "scheduler": (),
            "worker": (f"--model-repository={self._folder / 'models'}", "--exit-timeout-secs=30", *fetched),
            "durable": (),
            "gateway": (
                f"--http-port={self._ports[0]}",
                f"--grpc-port={self._ports[1]}",
                "--metrics-port=0",
                "--reuse-http-port=true",
                "--reuse-grpc-port=true",
                "--strict-readiness=false",
                "--exit-timeout-secs=30",
                "--durable-consumer=false",
                *fetched,
                *traced,
            ),
        }[role]
        url = self.nats.url_of("gateway" if role == "durable" else role)
        words = role, f"--nats={url}", *options
        return VersionedRole(installation, self._folder / "logs", *words, host=f"host-{position}")

    def replace(self, role: str, position: int, installation: Installation) -> None:
        """Starts a process of the version, waits until it is ready, and stops the one in its place."""
        old, new = self.roles[role][position], self._start(role, position, installation)
        self.roles[role][position] = new
        self._stopped.append(old)
        old.stop()

    def malformed(self) -> list[str]:
        """What processes have logged of messages that they did not understand."""
        everyone = [*self._stopped, *(one for members in self.roles.values() for one in members)]
        return [line for role in everyone for line in MALFORMED.findall(role.log())]

    def stop(self) -> None:
        """Stops every process, those that ask before those that answer."""
        for role in ("gateway", "durable", "worker", "scheduler"):
            for member in self.roles[role]:
                member.stop()

    def close(self) -> None:
        """Kills what still runs."""
        for role in ("gateway", "durable", "worker", "scheduler"):
            for member in self.roles[role]:
                member.kill()
        for member in self._stopped:
            member.kill()
        self.nats.stop()


class DurableRequests:
    """A thread that publishes durable requests for `fast_step`, and reads the record of each."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._publish()), daemon=True)
        self.stored = 0
        self.recorded = 0
        self.problems: list[str] = ["its requests did not all end"]

    @contextmanager
    def publishing(self) -> Iterator[DurableRequests]:
        """Publishes within the context, then waits for the record of every request."""
        self._thread.start()
        try:
            yield self
        finally:
            self._is_over.set()
            self._thread.join(60)

    async def _publish(self) -> None:
        problems: list[str] = []
        async with producer(self._url) as connected:
            while not self._is_over.is_set():
                await connected.send("event.fast_step", int64_body(self.stored), Nats_Msg_Id=f"r-{self.stored}")
                self.stored += 1
                await asyncio.sleep(0.05)
            deadline_s = time.monotonic() + 50
            while await connected.count("RESULT") < self.stored and time.monotonic() < deadline_s:
                await asyncio.sleep(0.05)
            for id, (headers, body) in await connected.records("fast_step"):
                self.recorded += 1
                if headers["Weir-Outcome"] != "succeeded" or id != f"r-{value_of(body)}":
                    problems.append(f"{id}: {headers['Weir-Outcome']} {body[:200]!r}")
            state = (await connected.jetstream.stream_info("RESULT")).state
            if not state.messages == state.last_seq == self.stored:
                problems.append(f"{self.stored} requests, {state.last_seq} records written, {state.messages} left")
        self.problems = problems


class Load:
    """Live requests over HTTP, gRPC and NATS, large ones, sequences, ensembles, and durable requests."""

    def __init__(self, cluster: MixedCluster) -> None:
        door, url = cluster.door, cluster.nats.url_of("producer")
        self._ledger = Ledger(door, threads=4, pause_s=0.03)
        self._sequences = SequenceLedger(door, "sums", 2)
        self._durable = DurableRequests(url)
        self._loops = [
            RequestLoop("large over HTTP", lambda stack: _large_over_http(stack, door), 0.1),
            RequestLoop("large over gRPC", lambda stack: _large_over_grpc(stack, door), 0.1),
            RequestLoop("over NATS", lambda stack: _over_nats(stack, url)),
        ]

    @contextmanager
    def sending(self) -> Iterator[Load]:
        """Sends within the context; at its end waits for what is under way."""
        with ExitStack() as stack:
            for source in (self._durable.publishing(), self._ledger.sending(), self._sequences.sending()):
                stack.enter_context(source)
            for loop in self._loops:
                stack.enter_context(loop.sending())
            self.wait_for_answers()
            yield self
            self.wait_for_answers()

    def wait_for_answers(self) -> None:
        """Returns once a request of each kind that was sent from now on is answered."""
        now_s = time.monotonic()
        self._ledger.wait_for_answers(now_s)
        self._sequences.wait_for_all(now_s)
        for loop in self._loops:
            wait_until(lambda loop=loop: loop.has_answered_since(now_s), 40)

    def problems(self) -> list[str]:
        """Everything that was lost, wrong or answered with an error, so far."""
        ended = [f"sequence: {ended.error}" for ended in list(self._sequences.ended) if ended.error]
        return [*self._ledger.faults, *ended, *self._sequences.wrong, *(f for loop in self._loops for f in loop.faults)]

    def problems_at_end(self) -> list[str]:
        """As `problems`, with what has no end."""
        found = [*self.problems(), *self._durable.problems]
        found += [problem for loop in self._loops for problem in loop.problems() if "unanswered" in problem]
        if self._ledger.unanswered or self._sequences.lost:
            found.append(f"{self._ledger.unanswered} requests and {self._sequences.lost} of sequences are unanswered")
        return found

    def summary(self) -> str:
        """The counts, in one line."""
        loops = ", ".join(f"{loop.name} {loop.sent}" for loop in self._loops)
        return (
            f"HTTP and gRPC {self._ledger.sent}, {loops}, of sequences {self._sequences.sent}, "
            f"durable {self._durable.stored} with {self._durable.recorded} records"
        )


def _large(value: int) -> dict[str, np.ndarray]:
    return {"IN": np.full((1, LARGE_VALUES), value, np.int64)}


def _same_value(array: np.ndarray) -> int:
    return int(array[0, 0]) if (array == array[0, 0]).all() and array.shape == (1, LARGE_VALUES) else -1


def _large_over_http(stack: ExitStack, door: Endpoints) -> Ask:
    client = stack.enter_context(door.http(timeout_s=60))
    return lambda value: _same_value(client.infer("copy", http_inputs(_large(value))).as_numpy("OUT"))


def _large_over_grpc(stack: ExitStack, door: Endpoints) -> Ask:
    client = stack.enter_context(door.grpc())
    return lambda value: _same_value(client.infer("copy", grpc_inputs(_large(value))).as_numpy("OUT"))


def _over_nats(stack: ExitStack, url: str) -> Ask:
    runner = stack.enter_context(asyncio.Runner())
    connected = producer(url)
    client = runner.run(connected.__aenter__()).client
    stack.callback(lambda: runner.run(connected.__aexit__(None, None, None)))

    async def ask(value: int) -> int:
        reply = await client.request("infer.fast_step", int64_body(value), timeout=60)
        assert "outputs" in json.loads(reply.data), reply.data
        return int(value_of(reply.data))

    return lambda value: runner.run(ask(value))


def write_models(root: Path) -> None:
    """Ensembles of ONNX and of Python models with dynamic batching, an identity, and sequences with checkpoints."""
    write_ledger_ensembles(root)
    write_identity(root, "copy", "INT64", "dynamic_batching { }")
    write_checkpointed(root, "sums", 1)


@pytest.mark.parametrize("first", ORDER)
def test_versions_replace_each_other_under_load(tmp_path: Path, before: Installation, first: str) -> None:
    after = this_version()
    write_models(tmp_path / "models")
    (tmp_path / "logs").mkdir()
    order = [first, *(role for role in ORDER if role != first)]
    cluster = MixedCluster(tmp_path, before)
    report: dict[str, str] = {}
    load, is_over = Load(cluster), False
    try:
        for model in ("fast", "slow", "fast_step", "copy", "sums"):
            wait_until(lambda model=model: cluster.door.is_ready(model), 60)
        with load.sending():
            steps = [(role, after) for role in order] + [(role, before) for role in reversed(order)]
            for role, version in steps:
                for position in range(COUNTS[role]):
                    known = len(load.problems())
                    began_s = time.monotonic()
                    cluster.replace(role, position, version)
                    took_s = time.monotonic() - began_s
                    load.wait_for_answers()
                    report[f"{role} {position} by the version {version.name}"] = (
                        f"{took_s:.1f} s, {len(load.problems()) - known} problems"
                    )
        cluster.stop()
        is_over = True
    finally:
        cluster.close()
        lines = [f"{what}: {found}" for what, found in report.items()]
        print("\n".join([*lines, load.summary()]))
        malformed = cluster.malformed()
        if not is_over:
            print("\n".join(load.problems()[:20] + malformed[:20]))
    problems = load.problems_at_end()
    assert not problems, "\n".join(problems[:20])
    assert not malformed, "\n".join(malformed[:20])
    assert cluster.nats.violations == []

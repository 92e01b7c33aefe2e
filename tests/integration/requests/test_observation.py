"""Batches and requests of a running server, as a process that observes it sees them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import nats
import numpy as np
import pytest

from tests.support.clients.producers import int64_body
from tests.support.clients.stock import grpc_inputs, http_inputs
from tests.support.models.zoo import write_faulty, write_identity
from tests.support.servers.weir_server import Server
from tests.support.waiting import eventually
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus
from weir.cluster.observation import observer as module
from weir.cluster.observation.observer import Observation
from weir.schemas.wire.observation import BatchReason, TraceReport

_names = itertools.count(1)

DELAYED = "dynamic_batching { max_queue_delay_microseconds: 40000 preferred_batch_size: [ 4 ] }"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("observed")
    write_identity(folder / "models", "batched", "INT64", DELAYED)
    write_identity(folder / "models", "plain", "INT64")
    write_faulty(folder / "models")
    started = Server(folder, folder / "models")
    try:
        yield started
        assert started.stop() == 0
        assert "Traceback" not in started.log()
    finally:
        started.close()


@pytest.fixture
async def bus(server: Server) -> AsyncIterator[Bus]:
    async with asyncio.TaskGroup() as background:
        connected = await Bus.connect(server.nats_url, f"observer-{next(_names)}", background, role="console")
        yield connected
        await connected.close()


@pytest.fixture
async def observation(bus: Bus) -> AsyncIterator[Observation]:
    made = Observation(bus, f"observer-{next(_names)}")
    await made.start()
    yield made
    made.close()
    await bus.flush()


def ask(server: Server, model: str, number: int = 7, id: str = "", protocol: str = "http") -> None:
    value = {"IN": np.array([[number]], np.int64)}
    if protocol == "http":
        with server.http() as client:
            assert client.infer(model, http_inputs(value), request_id=id).as_numpy("OUT") == number
    else:
        with server.grpc() as client:
            assert client.infer(model, grpc_inputs(value), request_id=id).as_numpy("OUT") == number


async def asked(server: Server, *arguments: Any) -> None:
    await asyncio.to_thread(ask, server, *arguments)


def names(trace: TraceReport) -> list[str]:
    return [name for name, _ in trace.times]


async def test_a_request_is_traced_through_all_hops_and_found_with_its_batch(
    server: Server, bus: Bus, observation: Observation
) -> None:
    observation.watch("batched", traces_per_s=100, batches_per_s=100)
    await asyncio.sleep(0)  # the lease is published
    await bus.flush()
    await asyncio.gather(*(asked(server, "batched", number, f"id-{number}") for number in range(8)))

    def is_complete(number: int) -> bool:
        found = observation.trace(f"id-{number}")
        return found is not None and found.batch is not None and bool(found.batch.busy_us)

    # Reports of a request and of its batch come from different processes.
    await eventually(lambda: all(map(is_complete, range(8))))
    for number in range(8):
        found = observation.trace(f"id-{number}")
        assert found is not None
        assert found.batch is not None
        trace, batch = found.trace, found.batch.report
        assert (trace.model, trace.version, trace.protocol, trace.status) == ("batched", 1, "http", 200)
        expected = [
            "HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "FRAME_SENT", "QUEUE_START", "BATCH_SENT",
            "WORKER_RECEIVED", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END",
            "INFER_RESPONSE_COMPLETE", "REQUEST_END", "HTTP_SEND_START", "HTTP_SEND_END",
        ]  # fmt: skip
        # QUEUE_START is computed from the worker's clock, so it may come a little before or behind its neighbours.
        assert sorted(names(trace)) == sorted(expected)
        order = [name for name in names(trace) if name not in ("QUEUE_START", "BATCH_SENT")]
        assert order == [name for name in expected if name not in ("QUEUE_START", "BATCH_SENT")]
        assert (trace.worker, trace.instance) == (batch.worker, batch.instance)
        assert (trace.scheduler, trace.batch, trace.batch_size) == (batch.scheduler, batch.id, batch.size)
        assert len(found.others) == batch.size - 1
        assert [one.lane for one in batch.requests] == ["live"] * batch.size
        assert batch.rows == batch.size
        assert found.batch.is_answered
        waited_us = next(one.waited_us for one in batch.requests if one.key == trace.key)
        assert batch.reason in (BatchReason.PREFERRED, BatchReason.DELAY)
        if batch.reason is BatchReason.DELAY and batch.size == 1:
            assert 40_000 <= waited_us < 1_000_000
    page = observation.batches("batched")
    assert sum(batch.report.size for batch in page.batches) == 8
    assert observation.batches("batched", page.next).batches == []


async def test_each_protocol_and_reason_is_named(server: Server, bus: Bus, observation: Observation) -> None:
    def watch() -> None:
        """As who reads does again and again: what nobody reads for some seconds is watched no longer."""
        observation.watch("", traces_per_s=100, batches_per_s=100)

    def protocols() -> set[str]:
        watch()
        return {trace.protocol for trace in observation.traces("plain")}

    client = await nats.connect(server.nats_url)
    watch()
    await asyncio.sleep(0)
    await bus.flush()
    # The gateway gets it after the watch, over the same connection; a request over gRPC could come before.
    await client.request("infer.plain", int64_body(2), timeout=10)
    watch()
    await asked(server, "plain", 1, "by-grpc", "grpc")
    watch()
    await client.publish("event.plain", int64_body(3), headers={"Nats-Msg-Id": "as-event"})
    await eventually(lambda: protocols() == {"grpc", "nats", "durable"})
    await client.close()
    assert {trace.model for trace in observation.traces()} == {"plain"}
    reasons = {batch.report.reason for batch in observation.batches("plain").batches}
    assert reasons == {BatchReason.FREE}
    lanes = [one.lane for batch in observation.batches("plain").batches for one in batch.report.requests]
    assert sorted(lanes) == ["event", "live", "live"]
    found = observation.trace("by-grpc")
    assert found is not None
    assert names(found.trace)[0] == "GRPC_WAITREAD_START"


async def test_a_request_is_traced_for_its_id_alone(server: Server, observation: Observation, bus: Bus) -> None:
    observation.watch_id("wanted")
    await bus.flush()
    await asked(server, "plain", 1, "other")
    await asked(server, "plain", 2, "wanted")
    await eventually(lambda: len(observation.traces()) == 1)
    await bus.flush()
    await asked(server, "plain", 3, "wanted")  # it has been found, and is not asked for any more
    observation.watch_id("by-grpc-too")
    await bus.flush()
    await asked(server, "plain", 3, "by-grpc-too", "grpc")
    await eventually(lambda: len(observation.traces()) == 2)
    assert {trace.id for trace in observation.traces()} == {"wanted", "by-grpc-too"}
    assert observation.batches("plain").batches == []


async def test_a_failure_is_traced_with_its_status(server: Server, bus: Bus, observation: Observation) -> None:
    observation.watch("faulty", traces_per_s=100, batches_per_s=100)
    await asyncio.sleep(0)
    await bus.flush()
    client = await nats.connect(server.nats_url)
    body = b'{"id":"failed","inputs":[{"name":"WHAT","datatype":"BYTES","shape":[1,1],"data":["error"]}]}'
    await client.request("infer.faulty", body, timeout=10)
    await client.close()
    await eventually(lambda: observation.trace("failed") is not None)
    found = observation.trace("failed")
    assert found is not None
    assert (found.trace.status, found.trace.error, found.trace.batch_size) == (404, "as you asked", 1)
    batch = observation.batches("faulty").batches[0].report
    assert batch.reason is BatchReason.SINGLE


async def test_nothing_is_reported_without_a_lease(server: Server, bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    await bus.subscribe(subjects.observed("*"), lambda message: heard.append(message.subject))
    await asked(server, "plain", 1, "unobserved")
    assert heard == []
    monkeypatch.setattr(module, "RENEW_S", 0.1)
    observation = Observation(bus, "brief")
    await observation.start()
    observation.watch("plain", 100, 100)
    await asyncio.sleep(0)
    await bus.flush()
    await asked(server, "plain", 2, "observed")
    await eventually(lambda: observation.trace("observed") is not None)
    monkeypatch.setattr(module, "KEPT_S", 0.0)
    observation.watch("plain", 100, 100)
    await eventually(lambda: not observation._watched)  # the lease was ended, because it was not asked for again
    await bus.flush()
    await asked(server, "plain", 3, "later")
    await bus.flush()
    assert observation.trace("later") is None

"""What looking for durable requests costs the broker while nothing changes, and that a change is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.durable.consumer.test_lost_connections import gateway
from weir.bus.naming import durable_subjects as subjects
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.nats.jetstream import JetStream
from weir.durable.consumer.consumer import LIST_INTERVAL_S, SWEEP_INTERVAL_S, DurableConsumer


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations that were requested of JetStream."""
    asked: list[str] = []
    ask = JetStream.ask

    async def recording(api: JetStream, operation: str, *arguments: Any, **named: Any) -> Any:
        asked.append(operation)
        return await ask(api, operation, *arguments, **named)

    monkeypatch.setattr(JetStream, "ask", recording)
    return asked


@pytest.fixture
def consumers(monkeypatch: pytest.MonkeyPatch) -> list[DurableConsumer]:
    """The consumers that were started. They do not sweep by themselves."""
    started: list[DurableConsumer] = []

    async def run(consumer: DurableConsumer) -> None:
        started.append(consumer)

    monkeypatch.setattr(DurableConsumer, "_run", run)
    return started


async def test_an_idle_sweep_is_one_request_and_lists_consumers_seldom(
    tmp_path: Path, requests: list[str], consumers: list[DurableConsumer]
) -> None:
    server = EmbeddedNats(tmp_path)
    server.start()
    try:
        async with gateway(server.url) as running:
            await running.bus.flush()
            consumer, now_s = consumers[0], 1000.0
            await consumer._sweep(now_s)
            requests.clear()
            idle_s = 20.0
            for _ in range(int(idle_s / SWEEP_INTERVAL_S)):
                now_s += SWEEP_INTERVAL_S
                await consumer._sweep(now_s)
            assert requests.count("STREAM.INFO.QUEUE") == idle_s / SWEEP_INTERVAL_S
            assert requests.count("CONSUMER.NAMES.QUEUE") == idle_s / LIST_INTERVAL_S
            assert len(requests) == idle_s / SWEEP_INTERVAL_S + idle_s / LIST_INTERVAL_S

            requests.clear()
            await running.jetstream.add_consumer(subjects.QUEUE_STREAM, durable_name="other", filter_subject="event.x")
            await consumer._sweep(now_s + 0.1)
            assert "CONSUMER.NAMES.QUEUE" in requests
    finally:
        server.stop()

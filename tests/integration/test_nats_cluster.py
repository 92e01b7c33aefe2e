"""A cluster of three nats-servers, of which one is lost: requests go on, and nothing is lost or answered twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from asking import http_inputs
from bus_streams import replicas_of
from model_zoo import write_identity
from nats_servers import NatsCluster
from role_starter import Start
from serving import wait_until


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started = Start(tmp_path, NatsCluster(tmp_path / "nats"))
    yield started
    started.close()


@pytest.mark.timeout(120)
def test_the_gateway_s_server_is_lost(start: Start, tmp_path: Path) -> None:
    write_identity(tmp_path / "models", "identity", "INT64")
    start("scheduler")
    start.worker()
    served = start.gateway()
    wait_until(served.is_ready)
    assert asyncio.run(replicas_of(start.nats.url)) == {3}
    values = {"IN": np.arange(4, dtype=np.int64).reshape(1, 4)}
    with served.http() as client:
        for _ in range(2):
            answer = client.infer("identity", http_inputs(values)).as_numpy("OUT")
            np.testing.assert_array_equal(answer, values["IN"])
            node = next(n for n in start.nats.nodes if any(name.startswith("gateway") for name in n.clients))
            node.kill()
            break
        answer = client.infer("identity", http_inputs(values)).as_numpy("OUT")
    np.testing.assert_array_equal(answer, values["IN"])

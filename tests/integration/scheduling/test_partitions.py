"""Models with several queues, and queues in several streams, over separate roles."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nats
import numpy as np
import pytest

from tests.support.clients.stock import http_inputs
from tests.support.models.sequences import write_accumulator
from tests.support.models.zoo import write_identity
from tests.support.servers.endpoints import Endpoints
from tests.support.servers.roles import RoleProcess, Start
from tests.support.waiting import wait_until

PARTITIONS = 4
SEQUENCES = 64
LENGTH = 5
PARAMETER = f'parameters {{ key: "weir_partitions" value {{ string_value: "{PARTITIONS}" }} }}\n'


class Cluster:
    """A scheduler, two workers and a gateway, with queues in four streams."""

    def __init__(self, folder: Path) -> None:
        self.models = folder / "models"
        write_identity(self.models, "plain", "FP32")
        with (self.models / "plain" / "config.pbtxt").open("a") as config:
            config.write(f"\ninstance_group [{{ count: 2 kind: KIND_CPU }}]\n{PARAMETER}")
        for strategy in ("direct { }", "oldest { max_candidate_sequences: 16 }"):
            write_accumulator(self.models, strategy.split()[0], strategy, batch=8, instances=PARTITIONS, more=PARAMETER)
        for number in range(4):
            write_identity(self.models, f"single_{number}", "FP32")
        self.start = Start(folder)
        self.scheduler = self.start("scheduler", "--live-streams=4")
        self.workers = [self._worker() for _ in range(2)]
        ports = self.start("gateway", "--http-port=0", "--grpc-port=0", "--metrics-port=0").facts
        self.gateway = Endpoints(*(f"127.0.0.1:{ports[f'{name}_port']}" for name in ("http", "grpc", "metrics")))
        wait_until(self.gateway.is_ready)

    def _worker(self) -> RoleProcess:
        return self.start(
            "worker",
            f"--model-repository={self.models}",
            "--model-control-mode=explicit",
            "--load-model=*",
            "--live-streams=2",
        )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("partitions"))
    try:
        yield made
        made.start.end_all()
    finally:
        made.start.close()


async def published(url: str) -> dict[str, tuple[list[str], list[str]]]:
    """Of each stream of live requests, its consumers and the subjects it takes."""
    client = await nats.connect(url)
    try:
        jetstream = client.jetstream()
        infos = [info for info in await jetstream.streams_info() if str(info.config.name).startswith("LIVE")]
        found = {}
        for info in infos:
            consumers = await jetstream.consumers_info(str(info.config.name))
            found[str(info.config.name)] = (sorted(c.name for c in consumers), info.config.subjects or [])
        return found
    finally:
        await client.close()


def ask(client: Any, model: str, content: np.ndarray, **options: Any) -> np.ndarray:
    return np.asarray(client.infer(model, http_inputs({"IN": content}), **options).as_numpy("OUT"))


def test_requests_of_a_partitioned_model_and_of_others(cluster: Cluster) -> None:
    def one(number: int) -> None:
        with cluster.gateway.http() as client:
            for model in ("plain", f"single_{number % 4}"):
                content = np.full((1, 3), number, np.float32)
                np.testing.assert_array_equal(ask(client, model, content), content)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(96)))
    streams = asyncio.run(published(cluster.start.nats.url))
    assert {name: subjects for name, (_, subjects) in streams.items()} == {
        "LIVE": ["live.*"],
        **{f"LIVE_{number}": [f"live.*.s{number}"] for number in (1, 2, 3)},
    }
    plain = [name for consumers, _ in streams.values() for name in consumers if name.startswith("live-plain")]
    assert sorted(plain) == ["live-plain", "live-plain=p1", "live-plain=p2", "live-plain=p3"]
    assert all(consumers for consumers, _ in streams.values()), "each stream has some of the queues"
    assert "not 2 as in --live-streams" in cluster.workers[0].log()
    metrics = cluster.gateway.metrics()
    assert metrics["nv_inference_request_success", "plain"] == 96
    assert metrics["weir_queue_depth", "plain"] == 0
    assert metrics["weir_batch_requests_sum", "plain"] == 96, "what the partitions count is summed up"


@pytest.mark.parametrize("model", ["direct", "oldest"])
def test_states_stay_with_their_sequences(cluster: Cluster, model: str) -> None:
    """Many sequences step by step side by side, by numbers and by texts: each has its own sum, in order."""

    def one(number: int) -> list[float]:
        sums = []
        id = number + 1 if number % 2 else f"sequence {number}"
        with cluster.gateway.http() as client:
            for step in range(LENGTH):
                content = np.full((1, 1), 10.0**step * (number % 7 + 1), np.float32)
                at = {"sequence_id": id, "sequence_start": step == 0, "sequence_end": step == LENGTH - 1}
                sums.append(float(ask(client, model, content, **at).item()))
        return sums

    with ThreadPoolExecutor(SEQUENCES) as pool:
        found = list(pool.map(one, range(SEQUENCES)))
    expected = [sum(10.0**step for step in range(end + 1)) for end in range(LENGTH)]
    assert found == [[(number % 7 + 1) * value for value in expected] for number in range(SEQUENCES)]


def test_all_partitions_let_go_of_what_is_unloaded(cluster: Cluster) -> None:
    with cluster.gateway.http() as client:
        client.unload_model("oldest")
        wait_until(lambda: all("successfully unloaded 'oldest' version 1" in w.log() for w in cluster.workers))
        client.load_model("oldest")
        assert ask(client, "oldest", np.ones((1, 1), np.float32), sequence_id=7, sequence_start=True).item() == 1
    assert "without its leave" not in cluster.workers[0].log()


def test_a_model_may_get_fewer_partitions(cluster: Cluster) -> None:
    with cluster.gateway.http() as client:
        config = client.get_model_config("plain")
        config["parameters"]["weir_partitions"]["string_value"] = "2"
        client.load_model("plain", config=json.dumps(config))
        for number in range(8):
            content = np.full((1, 3), number, np.float32)
            np.testing.assert_array_equal(ask(client, "plain", content), content)
        client.unload_model("plain")
    wait_until(lambda: all("successfully unloaded 'plain' version 1" in worker.log() for worker in cluster.workers))
    assert "without its leave" not in cluster.workers[0].log()


def test_a_sequence_model_needs_an_instance_for_each_partition(cluster: Cluster) -> None:
    write_accumulator(cluster.models, "few", instances=PARTITIONS - 1, more=PARAMETER)
    write_accumulator(cluster.models, "nonsense", more=PARAMETER.replace(f'"{PARTITIONS}"', '"65"'))
    with cluster.gateway.http() as client:
        with pytest.raises(Exception, match="'weir_partitions' is 4, but there are only 3 instances"):
            client.load_model("few")
        with pytest.raises(Exception, match="nonsense"):
            client.load_model("nonsense")
    assert "must be a whole number from 1 to 64, got '65'" in cluster.workers[0].log()


def test_the_layout_outlives_the_broker(cluster: Cluster) -> None:
    """Its streams are in memory: whoever is back first makes as many as there were, whatever he was told."""
    nats_server = cluster.start.nats
    nats_server.stop()
    nats_server.start()
    with cluster.gateway.http() as client:
        for number in range(4):
            content = np.full((1, 3), number, np.float32)
            np.testing.assert_array_equal(ask(client, f"single_{number}", content), content)
        wait_until(lambda: cluster.gateway.is_ready("direct"))
        for id in range(1, 9):
            first = ask(client, "direct", np.ones((1, 1), np.float32), sequence_id=id, sequence_start=True)
            assert first.item() == 1
    streams = asyncio.run(published(nats_server.url))
    assert sorted(streams) == ["LIVE", "LIVE_1", "LIVE_2", "LIVE_3"]

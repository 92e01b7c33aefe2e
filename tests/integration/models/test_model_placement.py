"""Several workers divide the models that declare resources, and reload one after another."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.integration.models.test_reload import write_plus
from tests.support.clients.stock import http_inputs
from tests.support.models.zoo import write_identity, write_versions
from tests.support.servers.endpoints import Endpoints
from tests.support.servers.roles import Start
from tests.support.waiting import wait_until

EXPLICIT = "--model-control-mode=explicit"


def declares(**parameters: str) -> str:
    """The parameters of a configuration."""
    return "\n".join(
        f'parameters {{ key: "weir_{key}" value {{ string_value: "{text}" }} }}' for key, text in parameters.items()
    )


def opened(start: Start) -> Endpoints:
    start("scheduler")
    ports = start("gateway", "--http-port=0", "--grpc-port=0", "--metrics-port=0").facts
    return Endpoints(*(f"127.0.0.1:{ports[f'{door}_port']}" for door in ("http", "grpc", "metrics")))


class Asking:
    """Threads that ask all of these models in turn, and what became of it."""

    def __init__(self, served: Endpoints, names: list[str]) -> None:
        self._served = served
        self._names = names
        self._stopped = threading.Event()
        self.answered = 0
        self.failures: list[str] = []

    @contextmanager
    def going_on(self, threads: int = 4) -> Iterator[Asking]:
        running = [threading.Thread(target=self._ask) for _ in range(threads)]
        for thread in running:
            thread.start()
        try:
            yield self
        finally:
            self._stopped.set()
            for thread in running:
                thread.join()

    def some_more(self, count: int = 100) -> None:
        enough = self.answered + count
        wait_until(lambda: self.answered >= enough or self.failures)

    def _ask(self) -> None:
        with self._served.http() as client:
            for number, name in enumerate(itertools.cycle(self._names)):
                if self._stopped.is_set():
                    return
                array = np.full((1, 4), number, np.float32)
                try:
                    assert (client.infer(name, http_inputs({"IN": array})).as_numpy("OUT") == array).all()
                except Exception as error:
                    self.failures.append(f"{name}: {error!r}")
                self.answered += 1


@pytest.mark.timeout(120)
def test_models_move_to_a_worker_that_comes_and_from_one_that_goes(start: Start, tmp_path: Path) -> None:
    root = tmp_path / "models"
    names = [f"m{number}" for number in range(8)]
    for name in names:
        write_identity(root, name, "FP32", declares(workers="1", memory_bytes="10"))
    write_identity(root, "everywhere", "FP32")
    write_identity(root, "large", "FP32", declares(memory_bytes="1000", requires="a100=1"))
    served = opened(start)
    options = (f"--model-repository={root}", "--model-memory-bytes=500")
    first = start("worker", *options, "--worker-id=first")
    with served.http() as client:
        rows = {row["name"]: row for row in client.get_model_repository_index()}
    assert rows["large"]["reason"] == (
        "Unavailable: no worker has room for the model: it needs 1000 bytes of memory, of which the largest worker has 500 "
        "in all; 1 of 'a100', of which a worker has 0 at most"
    )
    assert {row["state"] for name, row in rows.items() if name != "large"} == {"READY"}
    asking = Asking(served, [*names, "everywhere"])
    with asking.going_on():
        asking.some_more()
        second = start("worker", *options, "--worker-id=second")
        wait_until(
            lambda: second.log().count("successfully loaded 'm") == first.log().count("successfully unloaded 'm") > 0
        )
        asking.some_more()
        assert "the placement plan gives it to other workers" in first.log()
        assert "successfully loaded 'everywhere'" in second.log()
        third = start("worker", f"--model-repository={root}", "--worker-resource=a100=2", "--worker-id=third")
        wait_until(lambda: served.is_ready("large"))
        moved = third.log().count("successfully loaded 'm")
        asking.some_more()
        assert first.end() == 0, "it hands over what only it has"
        asking.some_more()
        assert third.end() == 0
        asking.some_more()
    assert asking.failures == []
    print(
        f"{asking.answered} requests while 2 workers came and 2 went, {moved} models had moved to the third; 0 failed"
    )
    assert not served.is_ready("large")
    assert served.is_ready("everywhere")


@pytest.mark.timeout(120)
def test_reloads_roll_and_stop_at_the_first_that_fails(start: Start, tmp_path: Path) -> None:
    roots = [tmp_path / f"models{number}" for number in range(3)]
    for root in roots:
        write_plus(root, 1.0, 1)
        write_identity(root, "one", "FP32", declares(workers="1"))
    served = opened(start)
    workers = [
        start("worker", f"--model-repository={root}", EXPLICIT, f"--worker-id=w{number}")
        for number, root in enumerate(roots)
    ]
    with served.http() as client:
        client.load_model("plus")
        client.load_model("one")
        loaded = [worker.log().count("successfully loaded 'one'") for worker in workers]
        assert sum(loaded) == 1, "the others left it to the one"
        asking = Asking(served, ["one"])
        with asking.going_on(2):
            for root in roots:
                write_plus(root, 2.0, 2)
            write_plus(roots[1], 2.0, 3)
            (roots[1] / "plus" / "1" / "model.onnx").write_bytes(b"broken")
            with pytest.raises(InferenceServerException, match="load failed for model 'plus': version 1 is at UNAVAIL"):
                client.load_model("plus")
            counts = [worker.log().count("successfully loaded 'plus'") for worker in workers]
            assert counts == [2, 1, 1], "the first has the new one, the second failed, the third was not asked"
            assert "'plus' is not reloaded: another worker failed to" in workers[2].log()

            for number, root in enumerate(roots):
                write_plus(root, 3.0, 1 + number)
            client.load_model("plus")
            moments = [last_moment(worker.log(), "successfully loaded 'plus'") for worker in workers]
            begun = [last_moment(worker.log(), "loading: plus:1") for worker in workers]
            assert moments == sorted(moments)
            assert all(before <= after for before, after in zip(moments, begun[1:], strict=False))

            # The one that has it goes without a word: the others have what was asked for, but for what did not work.
            broken = client.get_model_config("one")
            broken["input"][0]["data_type"] = "TYPE_INT64"
            with pytest.raises(InferenceServerException, match="load failed for model 'one'"):
                client.load_model("one", config=json.dumps(broken))
            holder = workers[loaded.index(1)]
            holder.end(signal.SIGKILL)
            left = [worker for worker in workers if worker is not holder]
            wait_until(lambda: any("successfully loaded 'one'" in worker.log() for worker in left))
            asking.some_more()
        assert asking.failures == []
        client.unload_model("one")
        assert not client.is_model_ready("one")


def last_moment(log: str, text: str) -> str:
    """The time of the last line with this text: hours, minutes, seconds and microseconds."""
    line = [line for line in log.splitlines() if text in line][-1]
    return line[1:].split(" ")[1]


@pytest.mark.timeout(120)
def test_workers_may_be_unlike_each_other(start: Start, tmp_path: Path) -> None:
    """One reads a model as one for GPUs, the other as one for the CPU; and they have other versions of another model."""
    old, new = tmp_path / "old", tmp_path / "new"
    for root, without in ((old, (2, 3)), (new, (1,))):
        folder = write_identity(root, "m", "FP32")
        on_cpu = (folder / "config.pbtxt").read_text()
        (folder / "configs").mkdir()
        (folder / "configs" / "cpu.pbtxt").write_text(on_cpu)
        (folder / "config.pbtxt").write_text(on_cpu.replace("KIND_CPU", "KIND_GPU"))
        folder = write_versions(root, "v", "version_policy { all { } }")
        for version in without:
            shutil.rmtree(folder / str(version))
    served = opened(start)
    start("worker", f"--model-repository={old}", EXPLICIT, "--load-model=v")
    zero = http_inputs({"IN": np.zeros(1, np.float32)})
    with served.http() as client:
        with pytest.raises(InferenceServerException, match="has kind KIND_GPU but no GPUs are available"):
            client.load_model("m")
        row = next(row for row in client.get_model_repository_index() if row["name"] == "m")
        assert row["state"] == "UNAVAILABLE"
        assert "instance group m_0 of model m has kind KIND_GPU but no GPUs are available" in row["reason"]
        other = start("worker", f"--model-repository={new}", EXPLICIT, "--model-config-name=cpu", "--load-model=v")
        client.load_model("m")
        assert {"name": "m", "version": "1", "state": "READY"} in client.get_model_repository_index()
        assert client.is_server_ready()

        answers = [client.infer("v", zero, version).as_numpy("OUT").item() for version in ("1", "2", "3", "")]
        assert answers == [1, 2, 3, 3]
        assert other.end() == 0
        wait_until(lambda: not served.is_ready("v/versions/3"))
        assert client.infer("v", zero).as_numpy("OUT").item() == 1

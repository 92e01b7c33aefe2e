"""Several workers share out the models that declare what they need, and reload one after another."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from asking import http_inputs
from endpoints import Endpoints
from model_zoo import write_identity, write_versions
from serving import wait_until
from test_reload import write_plus
from test_separate_roles import Start
from tritonclient.utils import InferenceServerException

EXPLICIT = "--model-control-mode=explicit"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    starting = Start(tmp_path)
    try:
        yield starting
        starting.end_all()
    finally:
        starting.close()


def declares(**parameters: str) -> str:
    """The parameters of a configuration."""
    return "\n".join(
        f'parameters {{ key: "weir_{key}" value {{ string_value: "{text}" }} }}' for key, text in parameters.items()
    )


def opened(start: Start, *options: str) -> Endpoints:
    start("scheduler")
    ports = start("gateway", "--http-port=0", "--grpc-port=0", "--metrics-port=0", *options).facts
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
        assert "other workers are to have it" in first.log()
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

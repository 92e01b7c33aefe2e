"""Roles on several hosts: large tensors are sent from process to process in all directions."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.clients.stock import http_inputs
from tests.support.models.ensembles import Step, write_ensemble
from tests.support.models.zoo import write_identity, write_python_model
from tests.support.servers.endpoints import Endpoints
from tests.support.servers.roles import RoleProcess, Start
from tests.support.waiting import wait_until

LISTENS = "--payload-listen=127.0.0.1"
LARGE = np.random.default_rng(7).random((1, 1_500_000), np.float32)  # 6 MB: several pieces, and once beyond the limit


class Hosts(Start):
    """A gateway on this host; models `near` and `here` in its worker, `far`, `asker` and `pair` in one of another host."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        steps: list[Step] = [("far", {"IN": "IN"}, {"OUT": "M"}), ("here", {"IN": "M"}, {"OUT": "OUT"})]
        write_identity(folder / "near", "here", "FP32")
        write_ensemble(folder / "near", "pair", {"IN": ("FP32", [-1])}, {"OUT": ("FP32", [-1])}, steps, 8)
        write_identity(folder / "away", "far", "FP32")
        write_python_model(folder / "away", "asker", "asks_here", {"IN": ("FP32", [-1])}, {"OUT": ("FP32", [-1])}, 8)
        self("scheduler")
        self.near = self("worker", f"--model-repository={folder / 'near'}", LISTENS)
        self.away = self.start_away()
        self.served = self.gateway(LISTENS)
        wait_until(lambda: all(map(self.served.is_ready, ("here", "far", "asker", "pair"))))

    def start_away(self) -> RoleProcess:
        return self("worker", f"--model-repository={self.folder / 'away'}", LISTENS, host="another")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    starting = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        yield starting
        starting.end_all()
    finally:
        starting.close()


def _echo(served: Endpoints, model: str, content: np.ndarray) -> np.ndarray:
    with served.http() as client:
        output = client.infer(model, http_inputs({"IN": content})).as_numpy("OUT")
    assert output is not None
    return output


@pytest.mark.timeout(120)
@pytest.mark.parametrize("model", ["far", "pair", "asker"])
@pytest.mark.parametrize("elements", [10, 40_000, 1_500_000])
def test_tensors_of_any_size_go_from_host_to_host(hosts: Hosts, model: str, elements: int) -> None:
    content = LARGE[:, :elements]
    assert np.array_equal(_echo(hosts.served, model, content), content)


@pytest.mark.timeout(120)
def test_steps_on_two_hosts_exchange_tensors_in_quick_succession(hosts: Hosts) -> None:
    """For 200 ms after a batch the worker of the ensemble may run calls of `here` itself, but not with content of `far`."""
    content = LARGE[:, :40_000]
    for _ in range(10):
        assert np.array_equal(_echo(hosts.served, "pair", content), content)


@pytest.mark.timeout(120)
def test_a_worker_that_dies_with_its_answer_costs_no_request(hosts: Hosts) -> None:
    for _ in range(2):
        hosts.away.end(signal.SIGKILL)
        hosts.away = hosts.start_away()
        assert np.array_equal(_echo(hosts.served, "far", LARGE), LARGE)

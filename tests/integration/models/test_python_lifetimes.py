"""Processes of Python models in a running server: they die, hang, grow, and answer readiness checks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.support.clients.stock import http_inputs
from tests.support.models.zoo import write_python_model
from tests.support.servers.weir_server import Server, alive
from tests.support.waiting import wait_until

MIB = 1 << 20

TENSORS = {"WHAT": ("BYTES", [1])}, {"SAID": ("BYTES", [1])}


def write_mortal(root: Path, name: str, instances: int, delay_us: int = 0, **parameters: int) -> None:
    reply = "".join(
        f'parameters {{ key: "weir_{key}" value {{ string_value: "{value}" }} }}\n' for key, value in parameters.items()
    )
    batching = f"dynamic_batching {{ max_queue_delay_microseconds: {delay_us} }}"
    group = f"instance_group [{{ count: {instances} kind: KIND_CPU }}]"
    write_python_model(root, name, "mortal", *TENSORS, 8, f"{batching}\n{group}\n{reply}")


@pytest.fixture(scope="module")
def mortals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("mortals")
    (models := folder / "models").mkdir()
    write_mortal(models, "one", 1)
    write_mortal(models, "hanging", 1, execution_timeout_ms=300)
    write_mortal(models, "pair_kill", 2, 100_000)
    write_mortal(models, "pair_hang", 2, 100_000, execution_timeout_ms=300)
    write_mortal(models, "bounded", 1, memory_limit_bytes=80 * MIB)
    with Server(folder, models) as started:
        yield started


def ask(client: tritonclient.http.InferenceServerClient, model: str, what: str) -> int:
    """The id of the process that answered."""
    answer = client.infer(model, http_inputs({"WHAT": np.array([[what.encode()]], np.object_)})).as_numpy("SAID").item()
    pid, _, said = answer.decode().partition(":")
    assert said == what
    return int(pid)


def test_one_that_dies_idle_is_there_again_before_it_is_asked(mortals: Server) -> None:
    with mortals.http() as client:
        pid = ask(client, "one", "first")
        os.kill(pid, signal.SIGKILL)
        # One question: between two it may be there again.
        wait_until(lambda: not client.is_server_ready())
        wait_until(lambda: client.is_model_ready("one"))
        assert client.is_server_ready()
        assert ask(client, "one", "second") != pid


def test_a_request_for_one_that_is_away_waits(mortals: Server) -> None:
    with mortals.http() as client:
        pid = ask(client, "one", "first")
        os.kill(pid, signal.SIGKILL)
        assert ask(client, "one", "second") != pid


def test_one_that_hangs_is_killed_and_its_request_done_again(mortals: Server) -> None:
    with mortals.http(timeout_s=60) as client:
        pid = ask(client, "hanging", "first")
        os.kill(pid, signal.SIGSTOP)
        assert ask(client, "hanging", "second") != pid
        assert not alive(pid)


@pytest.mark.parametrize("poison", ["kill", "hang"])
def test_a_poison_request_fails_alone(mortals: Server, poison: str) -> None:
    outcomes: list[str] = []

    def one(what: str) -> None:
        with mortals.http(timeout_s=60) as client:
            try:
                ask(client, f"pair_{poison}", what)
                outcomes.append("right")
            except InferenceServerException as error:
                outcomes.append(error.message())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, [*(f"mate {n}" for n in range(7)), poison]))
    failures = [outcome for outcome in outcomes if outcome != "right"]
    assert failures == ["the model's worker or process died 4 times while running this request"]
    assert outcomes.count("right") == 7


def test_one_that_has_grown_is_replaced_without_a_gap(mortals: Server) -> None:
    with mortals.http() as client:
        pid = ask(client, "bounded", "first")
        assert ask(client, "bounded", "grow 90") == pid
        unready = 0

        def is_another() -> bool:
            nonlocal unready
            unready += not client.is_model_ready("bounded")
            return ask(client, "bounded", "next") != pid

        wait_until(is_another)
        assert unready == 0
        wait_until(lambda: not alive(pid))


def test_one_that_outgrows_all_bounds_is_killed(mortals: Server) -> None:
    with mortals.http(timeout_s=60) as client:
        pid = ask(client, "bounded", "first")
        with pytest.raises(InferenceServerException, match="worker or process died 4 times"):
            ask(client, "bounded", "grow-fast 250")
        assert not alive(pid)
        wait_until(lambda: client.is_model_ready("bounded"))
        assert "more than 2 times its limit" in mortals.log()


def test_the_model_has_a_say_in_whether_it_is_ready(mortals: Server) -> None:
    with mortals.http() as client, mortals.grpc() as grpc:
        ask(client, "one", "unready")
        assert not client.is_model_ready("one")
        assert not grpc.is_model_ready("one", "1")
        assert not client.is_server_ready()
        assert not grpc.is_server_ready()
        ask(client, "one", "ready")
        assert client.is_model_ready("one")
        assert grpc.is_model_ready("one")
        assert client.is_server_ready()

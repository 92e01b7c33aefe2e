"""Implicit states and their checkpoints in a running server whose workers are killed during sequences."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.support.clients.stock import http_inputs
from tests.support.models.sequences import write_accumulator, write_checkpointed, write_history
from tests.support.servers.roles import RoleProcess
from tests.support.servers.weir_server import Server


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("stateful")
    (models := folder / "models").mkdir()
    write_accumulator(models, "direct", instances=2)
    write_accumulator(models, "oldest", "oldest { max_candidate_sequences: 16 }")
    write_accumulator(models, "alone", initial="", batch=0)
    write_history(models, "history")
    write_checkpointed(models, "each", 1)
    write_checkpointed(models, "third", 3, instances=2)
    (folder / "second").mkdir()
    with Server(folder, models) as started:
        yield started


def ask(
    client: Any, model: str, sequence: int, value: float, start: bool = False, end: bool = False, **more: Any
) -> Any:
    datatype, rows = (np.int32 if model == "history" else np.float32), () if model == "alone" else (1,)
    return client.infer(
        model,
        http_inputs({"IN": np.full((*rows, 1), value, datatype)}),
        sequence_id=sequence,
        sequence_start=start,
        sequence_end=end,
        **more,
    )


def total(*arguments: Any, **options: Any) -> float:
    return float(ask(*arguments, **options).as_numpy("OUT").ravel()[0])


@pytest.mark.parametrize("model", ["direct", "oldest", "alone"])
def test_states_stay_with_their_sequences(stateful: Server, model: str) -> None:
    """More sequences than slots, so that batches have null rows, and slots are used again."""

    def one(sequence: int) -> None:
        with stateful.http() as client:
            for round in (0, 1):
                for step in range(1, 11):
                    result = ask(client, model, sequence, sequence, start=step == 1, end=round == 1 and step == 10)
                    assert result.as_numpy("OUT").ravel().tolist() == [sequence * step]
                    assert result.as_numpy("STARTED").ravel().tolist() == [float(step == 1)]

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(one, range(1, 11)))


def test_a_state_that_grows_from_a_file(stateful: Server) -> None:
    """Those of one batch may be of different lengths."""

    def one(sequence: int) -> None:
        with stateful.http() as client:
            for step in range(1, 4 + sequence):
                result = ask(client, "history", sequence, 10 * step, start=step == 1)
                assert result.as_numpy("OUT").tolist() == [[7, 8, *range(10, 10 * step + 1, 10)]]

    with ThreadPoolExecutor(4) as pool, stateful.http() as client:
        list(pool.map(one, (1, 2, 3, 4)))
        assert ask(client, "history", 1, 5, start=True).as_numpy("OUT").tolist() == [[7, 8, 5]]


def test_a_state_is_no_output(stateful: Server) -> None:
    with stateful.http() as client:
        assert [output["name"] for output in client.get_model_metadata("direct")["outputs"]] == ["OUT", "STARTED"]
        with pytest.raises(InferenceServerException, match="unexpected inference output 'SUM_OUT' for model 'direct'"):
            ask(client, "direct", 1, 1, start=True, outputs=[_requested("SUM_OUT")])


def _requested(name: str) -> Any:
    from tritonclient.http import InferRequestedOutput

    return InferRequestedOutput(name)


def test_checkpointed_sequences_outlive_their_worker(stateful: Server) -> None:
    with stateful.http() as client:
        for model in ("each", "third", "direct"):
            for sequence in (1, 2, 3):
                for step in range(1, 6):
                    assert total(client, model, sequence, sequence, start=step == 1) == sequence * step
        stateful.kill("worker")
        stateful.wait_ready()
        for model in ("each", "third"):
            for sequence in (1, 2, 3):
                for step in range(6, 9):
                    assert total(client, model, sequence, sequence, end=step == 8) == sequence * step
        with pytest.raises(InferenceServerException, match="the state of sequence 1 of model 'direct' was lost"):
            ask(client, "direct", 1, 1)
        with pytest.raises(InferenceServerException, match="must specify the START flag"):
            ask(client, "each", 1, 1)


def outcome(client: Any, model: str, sequence: int) -> float | str:
    """The sequence's total after one more, or what became of it."""
    try:
        return total(client, model, sequence, 1)
    except InferenceServerException as error:
        return str(error.message())


def test_sequences_go_on_at_another_worker(stateful: Server) -> None:
    """Requests run, wait and have run since the last checkpoint when one of two workers is killed."""
    second = RoleProcess(
        stateful.folder / "second",
        "worker",
        f"--nats={stateful.nats_url}",
        f"--model-repository={stateful.folder / 'models'}",
    )
    steps, sequences = 60, range(11, 19)
    under_way = threading.Barrier(2 * len(sequences) + 1)

    def one(model: str, sequence: int) -> None:
        with stateful.http() as client:
            for step in range(1, steps + 1):
                assert total(client, model, sequence, sequence, start=step == 1, end=step == steps) == sequence * step
                if step == 5:
                    under_way.wait(20)

    with ThreadPoolExecutor(2 * len(sequences)) as pool, stateful.http() as client:
        for sequence in sequences:
            assert total(client, "direct", sequence, 1, start=True) == 1
        running = [pool.submit(one, model, sequence) for model in ("each", "third") for sequence in sequences]
        under_way.wait(20)
        second.end(signal.SIGKILL)
        for future in running:
            future.result(30)
        ends = [outcome(client, "direct", sequence) for sequence in sequences]
        lost = [
            f"the state of sequence {sequence} of model 'direct' was lost with its instance: " for sequence in sequences
        ]
        assert all(end == 2 or str(end).startswith(name) for end, name in zip(ends, lost, strict=True))
        assert 0 < ends.count(2) < len(ends)

"""Sequences as in Triton's sequence examples, with direct and oldest batchers, one request after another."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.support.clients.stock import grpc_inputs, http_inputs
from tests.support.models.zoo import write_python_model
from tests.support.servers.weir_server import Server

VALUES = [11, 7, 5, 3, 2, 0, 1]

CONTROLS = """
  control_input [
    { name: "START" control [{ kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }] },
    { name: "END" control [{ kind: CONTROL_SEQUENCE_END bool_false_true: [false, true] }] },
    { name: "READY" control [{ kind: CONTROL_SEQUENCE_READY fp32_false_true: [0, 1] }] }%s
  ]
"""
CORRID = ',\n    { name: "CORRID" control [{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_%s }] }'


def write_sequence_model(root: Path, name: str, batching: str, controls: str, instances: int = 1) -> None:
    more = f"""
sequence_batching {{ {batching} {controls} }}
instance_group [{{ count: {instances} kind: KIND_CPU }}]
"""
    write_python_model(
        root,
        name,
        "accumulate",
        {"INPUT": ("INT32", [1])},
        {"OUTPUT": ("INT32", [1]), "INSTANCE": ("BYTES", [1])},
        4,
        more,
    )


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("sequences")
    (models := folder / "models").mkdir()
    idle = "max_sequence_idle_microseconds: 60000000"
    write_sequence_model(models, "direct", f"direct {{ }} {idle}", CONTROLS % CORRID % "UINT64", 2)
    write_sequence_model(models, "by_row", f"direct {{ }} {idle}", CONTROLS % "")
    write_sequence_model(
        models, "oldest", f"oldest {{ max_candidate_sequences: 64 }} {idle}", CONTROLS % CORRID % "STRING", 2
    )
    write_sequence_model(
        models, "hasty", "direct { } max_sequence_idle_microseconds: 200000", CONTROLS % CORRID % "UINT64"
    )
    with Server(folder, models) as started:
        yield started


def ask(client: Any, model: str, sequence: int | str, value: int, start: bool = False, end: bool = False) -> int:
    inputs = http_inputs if isinstance(client, tritonclient.http.InferenceServerClient) else grpc_inputs
    result = client.infer(
        model,
        inputs({"INPUT": np.array([[value]], np.int32)}),
        sequence_id=sequence,
        sequence_start=start,
        sequence_end=end,
    )
    return int(result.as_numpy("OUTPUT")[0, 0])


def run(client: Any, model: str, sequence: int | str) -> list[int]:
    last = len(VALUES) - 1
    return [ask(client, model, sequence, v, n == 0, n == last) for n, v in enumerate(VALUES)]


SUMS = [sum(VALUES[: n + 1]) for n in range(len(VALUES))]


@pytest.mark.parametrize(("model", "sequence"), [("direct", 1000), ("by_row", 1001), ("oldest", "a sequence")])
def test_a_sequence_accumulates_over_both_protocols(sequences: Server, model: str, sequence: int | str) -> None:
    with sequences.http() as http, sequences.grpc() as grpc:
        assert run(http, model, sequence) == SUMS
        assert run(grpc, model, sequence) == SUMS


@pytest.mark.parametrize("model", ["direct", "by_row", "oldest"])
def test_many_sequences_at_once_keep_order_and_place(sequences: Server, model: str) -> None:
    """More sequences than slots: each runs in order, on one instance, whatever comes between."""
    count = 12

    def one(n: int) -> tuple[list[int], set[bytes]]:
        sums, places = [], set()
        with sequences.http() as client:
            for step, value in enumerate(VALUES):
                result = client.infer(
                    model,
                    http_inputs({"INPUT": np.array([[value + n]], np.int32)}),
                    sequence_id=f"s{n}" if model == "oldest" else n + 1,
                    sequence_start=step == 0,
                    sequence_end=step == len(VALUES) - 1,
                )
                sums.append(int(result.as_numpy("OUTPUT")[0, 0]))
                places.add(result.as_numpy("INSTANCE")[0, 0])
        return sums, places

    with ThreadPoolExecutor(count) as pool:
        outcomes = list(pool.map(one, range(count)))
    for n, (sums, places) in enumerate(outcomes):
        assert sums == [SUMS[step] + n * (step + 1) for step in range(len(VALUES))]
        assert len(places) == 1
    if model == "direct":
        assert len(set.union(*(places for _, places in outcomes))) == 2


def test_refusals(sequences: Server) -> None:
    def refusal(**wrong: Any) -> InferenceServerException:
        inputs = http_inputs({"INPUT": np.zeros((wrong.pop("rows", 1), 1), np.int32)})
        with sequences.http() as client, pytest.raises(InferenceServerException) as caught:
            client.infer("direct", inputs, **wrong)
        return caught.value

    error = refusal()
    assert error.status() == "400"
    assert "inference request to model 'direct' must specify a non-zero or non-empty correlation ID" in error.message()
    error = refusal(sequence_id=9, sequence_start=True, rows=2)
    assert "inference request to model 'direct' must specify batch-size 1 due to requirements of sequence batcher" in (
        error.message()
    )
    error = refusal(sequence_id=77)
    assert error.status() == "400"
    assert error.message() == (
        "inference request for sequence 77 to model 'direct' must specify the START flag on the first request of the "
        "sequence"
    )
    error = refusal(sequence_id="text", sequence_start=True)
    assert (
        "sequence batching control 'CORRID' data-type is 'BYTES', but model 'direct' expects 'UINT64'"
        in error.message()
    )


def test_an_idle_sequence_loses_its_slot(sequences: Server) -> None:
    with sequences.http() as client:
        assert ask(client, "hasty", 5, 1, start=True) == 1
        # Its only instance has four slots: these four fit only once the first has timed out.
        for other in (6, 7, 8, 9):
            assert ask(client, "hasty", other, 1, start=True) == 1
        with pytest.raises(InferenceServerException, match="must specify the START flag"):
            ask(client, "hasty", 5, 1)


def test_a_start_on_a_live_sequence_starts_it_anew(sequences: Server) -> None:
    with sequences.grpc() as client:
        assert ask(client, "direct", 40, 5, start=True) == 5
        assert ask(client, "direct", 40, 5) == 10
        assert ask(client, "direct", 40, 3, start=True, end=True) == 3
        with pytest.raises(InferenceServerException, match="must specify the START flag"):
            ask(client, "direct", 40, 1)


def test_a_killed_worker_ends_its_sequences_by_name(sequences: Server) -> None:
    with sequences.http() as client:
        assert ask(client, "direct", 50, 5, start=True) == 5
        sequences.kill("worker")
        sequences.wait_ready()
        with pytest.raises(InferenceServerException) as caught:
            ask(client, "direct", 50, 5)
        assert caught.value.status() == "503"
        assert caught.value.message() == (
            "the state of sequence 50 of model 'direct' was lost with its instance: start the sequence again"
        )
        assert ask(client, "direct", 50, 5, start=True, end=True) == 5

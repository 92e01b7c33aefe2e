"""The requests of Triton's published sequence and decoupled examples, one by one and in streams."""

from __future__ import annotations

import queue
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.clients.triton_examples import GRPC, GRPC_AIO, HTTP, HTTP_AIO, connect, given
from tests.support.models.triton_examples import VALUES
from tests.support.servers.weir_server import Server

WAIT_S = 20
NEGATIVE = [-value for value in VALUES]
WAYS = pytest.mark.parametrize("dyna", [False, True], ids=["direct", "dyna"])


class Sequence(NamedTuple):
    """One of the three sequences of an example: what it sends and what is to come back."""

    model: str
    id: int | str
    values: list[int]
    expected: list[int]

    def requests(self, protocol: ModuleType) -> Iterator[dict[str, Any]]:
        """The arguments of each request's `infer`."""
        for number, value in enumerate(self.values, 1):
            yield {
                "model_name": self.model,
                "inputs": [given(protocol, "INPUT", np.full((1, 1), value, np.int32), "INT32")],
                "outputs": [protocol.InferRequestedOutput("OUTPUT")],
                "request_id": f"{self.id}_{number}",
                "sequence_id": self.id,
                "sequence_start": number == 1,
                "sequence_end": number == len(self.values),
            }


def sequences(dyna: bool, offset: int) -> list[Sequence]:
    """Two with numbers for ids and one with text, as the examples send them with and without `--dyna`.

    The models answer their input, plus 1 at the start. With `dyna` they add the id at the end, and the one whose id is
    text adds up its inputs instead of marking the start.
    """
    model = "simple_dyna_sequence" if dyna else "simple_sequence"
    first, second = 1000 + 2 * offset, 1001 + 2 * offset
    expected = [[1, *VALUES], [101, *NEGATIVE], [21, *NEGATIVE]]
    if not dyna:
        text = str(uuid.uuid4())
        return [
            Sequence(model, first, [0, *VALUES], expected[0]),
            Sequence(model, second, [100, *NEGATIVE], expected[1]),
            Sequence(model, text, [20, *NEGATIVE], expected[2]),
        ]
    text = str(1002 + offset)
    expected[0][-1] += first
    expected[1][-1] += second
    expected[2] = [int(total) for total in np.cumsum([20, *NEGATIVE])]
    expected[2][-1] += int(text)
    return [
        Sequence(model, first, [0, *VALUES], expected[0]),
        Sequence(model, second, [100, *NEGATIVE], expected[1]),
        Sequence("simple_string_dyna_sequence", text, [20, *NEGATIVE], expected[2]),
    ]


# simple_http_sequence_sync_infer_client, simple_grpc_sequence_sync_infer_client, and both for aio


@WAYS
@pytest.mark.parametrize("protocol", [HTTP, GRPC], ids=["http", "grpc"])
def test_sequences_one_by_one(examples: Server, protocol: ModuleType, dyna: bool) -> None:
    with connect(protocol, examples) as client:
        for sequence in sequences(dyna, 0):
            answers = [client.infer(**request).as_numpy("OUTPUT") for request in sequence.requests(protocol)]
            assert [answer.shape for answer in answers] == [(1, 1)] * len(answers)
            assert [int(answer[0, 0]) for answer in answers] == sequence.expected


@WAYS
@pytest.mark.parametrize("protocol", [HTTP_AIO, GRPC_AIO], ids=["http", "grpc"])
async def test_aio_sequences_one_by_one(examples: Server, protocol: ModuleType, dyna: bool) -> None:
    async with connect(protocol, examples) as client:
        for sequence in sequences(dyna, 10):
            answers = [(await client.infer(**request)).as_numpy("OUTPUT") for request in sequence.requests(protocol)]
            assert [int(answer[0, 0]) for answer in answers] == sequence.expected


# simple_grpc_sequence_stream_infer_client, simple_grpc_aio_sequence_stream_infer_client


def _assert_answers(sent: list[Sequence], results: list[Any]) -> None:
    """Asserts that each sequence has all its answers, in order; results of different sequences may mix."""
    answers = defaultdict(list)
    for result in results:
        answers[result.get_response().id.split("_")[0]].append(int(result.as_numpy("OUTPUT")[0, 0]))
    assert answers == {str(sequence.id): sequence.expected for sequence in sent}


@WAYS
def test_sequences_in_a_stream(examples: Server, dyna: bool) -> None:
    sent = sequences(dyna, 20)
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    results = []
    with connect(GRPC, examples) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        for sequence in sent:
            for request in sequence.requests(GRPC):
                client.async_stream_infer(**request)
        for _ in range(3 * (len(VALUES) + 1)):
            result, error = answers.get(timeout=WAIT_S)
            assert error is None
            results.append(result)
    _assert_answers(sent, results)


@WAYS
async def test_sequences_in_an_aio_stream(examples: Server, dyna: bool) -> None:
    sent = sequences(dyna, 30)

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for sequence in sent:
            for request in sequence.requests(GRPC_AIO):
                yield request

    results = []
    async with connect(GRPC_AIO, examples) as client:
        async for result, error in client.stream_infer(inputs_iterator=requests(), stream_timeout=WAIT_S):
            assert error is None
            results.append(result)
    _assert_answers(sent, results)


# simple_grpc_custom_repeat


@pytest.mark.parametrize("delay_ms", [20, 0])
def test_repeat(examples: Server, delay_ms: int) -> None:
    """Ten responses to one request; the model's execute returns while they are being sent."""
    count, first = 10, 100
    inputs = [
        given(GRPC, "IN", np.arange(first, first + count, dtype=np.int32), "INT32"),
        given(GRPC, "DELAY", np.full(count, delay_ms, np.uint32), "UINT32"),
        given(GRPC, "WAIT", np.array([delay_ms], np.uint32), "UINT32"),
    ]
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with connect(GRPC, examples) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        outputs = [GRPC.InferRequestedOutput("OUT")]
        client.async_stream_infer(model_name="repeat_int32", inputs=inputs, outputs=outputs)
        results = [answers.get(timeout=WAIT_S) for _ in range(count)]
    assert [error for _, error in results] == [None] * count
    contents = [result.as_numpy("OUT") for result, _ in results]
    assert [content.shape for content in contents] == [(1,)] * count
    assert [int(content[0]) for content in contents] == list(range(first, first + count))
    assert results[0][0].as_numpy("IDX") is None
    assert answers.empty()

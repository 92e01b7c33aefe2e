"""Joining and splitting batches: every request gets its own rows, for all datatypes and sizes."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.bus.naming.identity import new_id
from weir.bus.payloads.arena import PayloadArena, PayloadReader
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.requests import InferRequest, RequestedOutput
from weir.schemas.core.tensors import DATATYPES, PayloadRef, Tensor
from weir.worker.execution.batch_tensors import BatchAssembler, split_outputs


def request(*tensors: Tensor, outputs: tuple[str, ...] = ()) -> InferRequest:
    return InferRequest("m", inputs=list(tensors), outputs=[RequestedOutput(name) for name in outputs])


def rows(datatype: str, count: int, start: int) -> np.ndarray:
    """`count` rows of two elements that are unique."""
    numbers = np.arange(start, start + 2 * count).reshape(count, 2)
    if datatype == "BYTES":
        return np.array([str(number).encode() * (number % 3) for number in numbers.ravel()], np.object_).reshape(
            count, 2
        )
    return (numbers % 2 if datatype == "BOOL" else numbers).astype(DATATYPES[datatype].numpy)


@pytest.fixture
def arena() -> Iterator[PayloadArena]:
    opened = PayloadArena(new_id("test"), capacity_bytes=64 << 20)
    yield opened
    opened.close()


def placed(arena: PayloadArena, tensor: Tensor) -> Tensor:
    slot = arena.allocate(tensor.size_bytes)
    assert slot is not None
    slot.view[:] = tensor.data  # type: ignore[assignment]
    return Tensor(tensor.name, tensor.datatype, tensor.shape, slot.ref())


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("sizes", [[1], [3], [1, 1], [2, 1, 3]])
def test_each_request_gets_its_own_rows(datatype: str, sizes: list[int]) -> None:
    given_rows = [rows(datatype, size, 10 * number) for number, size in enumerate(sizes)]
    requests = [request(Tensor.from_numpy("IN", array, datatype)) for array in given_rows]
    batch = BatchAssembler().assemble(requests, True, PayloadReader())["IN"]
    np.testing.assert_array_equal(batch, np.concatenate(given_rows))
    for array, tensors in zip(given_rows, split_outputs(requests, [("OUT", datatype, batch)], True), strict=True):
        assert [(tensor.name, tensor.datatype) for tensor in tensors] == [("OUT", datatype)]
        np.testing.assert_array_equal(tensors[0].to_numpy(), array)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 3))
def test_rows_of_any_sizes(sizes: list[int], width: int) -> None:
    total = sum(sizes)
    output = np.arange(total * width, dtype=np.int32).reshape(total, width)
    requests = [request(Tensor("IN", "INT32", (size, 0), b"")) for size in sizes]
    parts = split_outputs(requests, [("OUT", "INT32", output)], True)
    np.testing.assert_array_equal(np.concatenate([tensors[0].to_numpy() for tensors in parts]), output)
    assert [tensors[0].shape for tensors in parts] == [(size, width) for size in sizes]


def test_inputs_are_matched_by_name() -> None:
    a, b = rows("INT32", 1, 0), rows("INT32", 1, 100)
    first = request(Tensor.from_numpy("A", a, "INT32"), Tensor.from_numpy("B", b, "INT32"))
    second = request(Tensor.from_numpy("B", b, "INT32"), Tensor.from_numpy("A", a, "INT32"))
    batch = BatchAssembler().assemble([first, second], True, PayloadReader())
    np.testing.assert_array_equal(batch["A"], np.concatenate([a, a]))
    np.testing.assert_array_equal(batch["B"], np.concatenate([b, b]))


def test_content_in_shared_memory_and_in_messages_can_be_joined(arena: PayloadArena) -> None:
    arrays = [np.random.default_rng(n).random((1, 100_000), np.float32) for n in range(3)]
    tensors = [Tensor.from_numpy("IN", array, "FP32") for array in arrays]
    tensors[1] = placed(arena, tensors[1])
    assembler = BatchAssembler()
    for _ in range(2):  # the second time in the buffer of the first
        batch = assembler.assemble([request(tensor) for tensor in tensors], True, PayloadReader())
        np.testing.assert_array_equal(batch["IN"], np.concatenate(arrays))
    alone = assembler.assemble([request(tensors[1])], True, PayloadReader())
    np.testing.assert_array_equal(alone["IN"], arrays[1])


def test_unaligned_content_is_aligned() -> None:
    content = memoryview(b"x" + np.arange(4, dtype=np.float64).tobytes())[1:]
    array = BatchAssembler().assemble([request(Tensor("IN", "FP64", [1, 4], content))], True, PayloadReader())["IN"]
    assert array.flags.aligned
    np.testing.assert_array_equal(array, [[0, 1, 2, 3]])


def test_only_requested_outputs_are_returned() -> None:
    asked = request(Tensor("IN", "INT32", (1, 0), b""), outputs=("B",))
    not_asked = request(Tensor("IN", "INT32", (1, 0), b""))
    outputs = [(name, "INT32", rows("INT32", 2, 0)) for name in "ABC"]
    parts = split_outputs([asked, not_asked], outputs, True)
    assert [[tensor.name for tensor in tensors] for tensors in parts] == [["B"], ["A", "B", "C"]]


def test_outputs_without_a_batch_dimension_may_have_any_shape() -> None:
    only = request(Tensor("IN", "INT32", (), np.int32(7).tobytes()))
    array = BatchAssembler().assemble([only], False, PayloadReader())["IN"]
    assert (array.shape, array.item()) == ((), 7)
    ((output,),) = split_outputs([only], [("OUT", "INT32", np.arange(6, dtype=np.int32).reshape(2, 3))], False)
    assert tuple(output.shape) == (2, 3)
    with pytest.raises(WeirError, match="several requests at once"):
        BatchAssembler().assemble([only, only], False, PayloadReader())


@pytest.mark.parametrize("output", [np.zeros((3, 1), np.float32), np.float32(1)])
def test_an_output_with_another_number_of_rows_is_an_error(output: np.ndarray) -> None:
    requests = [request(Tensor("IN", "FP32", (1, 0), b"")) for _ in range(2)]
    with pytest.raises(WeirError, match=r"output 'OUT' has \d rows for a batch of 2") as error:
        split_outputs(requests, [("OUT", "FP32", np.asarray(output))], True)
    assert error.value.code is ErrorCode.INTERNAL


def test_released_content_is_an_error() -> None:
    gone = request(Tensor("IN", "FP32", [1, 1], PayloadRef("weir-test-gone.131072", 0, 0, 64, 4)))
    with pytest.raises(WeirError, match="the content of input 'IN' was released") as error:
        BatchAssembler().assemble([gone], True, PayloadReader())
    assert error.value.code is ErrorCode.UNAVAILABLE


@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
@pytest.mark.parametrize("widths", [[3], [3, 1, 0, 4]])
def test_a_ragged_input_has_one_dimension(datatype: str, widths: list[int]) -> None:
    given_rows = [rows(datatype, 4, 10 * number)[:, :1].reshape(1, 4)[:, :width] for number, width in enumerate(widths)]
    beside = [Tensor("B", "INT32", [1, 1], np.int32(number).tobytes()) for number in range(len(widths))]
    requests = [
        request(Tensor.from_numpy("IN", array, datatype), other)
        for array, other in zip(given_rows, beside, strict=True)
    ]
    batch = BatchAssembler({"IN", "ABSENT"}).assemble(requests, True, PayloadReader())
    np.testing.assert_array_equal(batch["IN"], np.concatenate([array.ravel() for array in given_rows]))
    assert batch["B"].shape == (len(widths), 1)

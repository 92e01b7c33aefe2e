"""`SharedMemoryIO`: inputs from clients' memory and outputs into it, in batches with invalid requests."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weir.bus.naming.identity import SHARED_MEMORY_DIRECTORY, new_id
from weir.bus.payloads.arena import PayloadReader
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.requests import InferRequest, RequestedOutput
from weir.schemas.core.tensors import RegionRef, Tensor, pack_bytes
from weir.worker.backend_api.interface import Result
from weir.worker.execution.batch_tensors import BatchAssembler
from weir.worker.execution.shared_memory import SharedMemoryAccess, SharedMemoryIO, contiguous_view

GATEWAY = new_id("gateway")

MakeObject = Callable[[bytes], Path]


@pytest.fixture
def make_object() -> Iterator[MakeObject]:
    """Creates clients' shared memory objects, which are removed at the end."""
    made: list[Path] = []

    def make(content: bytes) -> Path:
        made.append(SHARED_MEMORY_DIRECTORY / f"test_{secrets.token_hex(6)}")
        made[-1].write_bytes(content)
        return made[-1]

    yield make
    for path in made:
        path.unlink(missing_ok=True)


def place(path: Path, offset: int, size: int) -> RegionRef:
    return RegionRef(path.name, path.stat().st_ino, offset, size)


def reading(ref: RegionRef | bytes, datatype: str, *shape: int) -> InferRequest:
    return InferRequest("m", id="7", inputs=[Tensor("IN", datatype, shape, ref)])


def wanting(*places: tuple[str, RegionRef | None]) -> InferRequest:
    request = InferRequest("m")
    for name, ref in places:
        request.outputs.append(RequestedOutput(name))
        request.outputs[-1].region = ref
    return request


def opened() -> SharedMemoryIO:
    return SharedMemoryIO(SharedMemoryAccess(True))


def fetched(memory: SharedMemoryIO, requests: list[InferRequest]) -> list[InferRequest]:
    """The requests of a batch that could be read, after the end of the batch before."""
    if memory.content is not None:
        memory.release(memory.content)
    memory.content = None
    good: list[InferRequest] = []
    for request in requests:
        try:
            memory.fetch(request, GATEWAY)
        except WeirError:
            continue
        good.append(request)
    return good


def join_inputs(requests: list[InferRequest]) -> np.ndarray:
    return BatchAssembler().assemble(requests, True, PayloadReader())["IN"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batches=st.lists(
        st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["good", "cut", "inline"])), min_size=1, max_size=6),
        min_size=1,
        max_size=4,
    )
)
def test_batches_of_good_and_bad_requests(make_object: MakeObject, batches: list[list[tuple[int, str]]]) -> None:
    numbers = np.arange(1024, dtype=np.float32)
    path = make_object(numbers.tobytes())
    memory = opened()
    for batch in batches:
        requests: list[InferRequest] = []
        expected: list[np.ndarray] = []
        for position, (rows, kind) in enumerate(batch):
            start = 0 if kind != "cut" else 1024 - 2
            values = numbers[8 * position : 8 * position + 2 * rows].reshape(rows, 2)
            ref = place(path, 4 * start or 32 * position, 8 * rows + (8 if kind == "cut" else 0))
            requests.append(reading(values.tobytes() if kind == "inline" else ref, "FP32", rows, 2))
            if kind != "cut":
                expected.append(values)
        good = fetched(memory, requests)
        assert len(good) == len(expected)
        if good:
            np.testing.assert_array_equal(join_inputs(good), np.concatenate(expected))


def test_contiguous_rows_are_not_copied_again(make_object: MakeObject) -> None:
    content = np.arange(300_000, dtype=np.float32)
    path = make_object(content.tobytes())
    memory = opened()
    for attempt in range(3):
        requests = [reading(place(path, 400_000 * row, 400_000), "FP32", 1, 100_000) for row in range(3)]
        good = fetched(memory, requests)
        together = contiguous_view([request.inputs[0].data for request in good])  # type: ignore[misc]
        assert (together is None) == (attempt == 0), "the first batch tells how much room such batches need"
        np.testing.assert_array_equal(join_inputs(good).ravel(), content)


def test_batches_that_run_at_once_do_not_share_memory(make_object: MakeObject) -> None:
    path = make_object(np.arange(4, dtype=np.float32).tobytes())
    memory = opened()
    requests, contents = [], []
    for number in (0, 1):
        memory.content = None
        requests.append(reading(place(path, 4 * number, 4), "FP32", 1, 1))
        memory.fetch(requests[-1], GATEWAY)
        contents.append(memory.content)
    assert [join_inputs([request]).tolist() for request in requests] == [[[0.0]], [[1.0]]]
    for content in contents:
        assert content is not None
        memory.release(content)
    memory.content = None
    memory.fetch(reading(place(path, 8, 4), "FP32", 1, 1), GATEWAY)
    assert memory.content in contents


def test_strings_fail_alone(make_object: MakeObject) -> None:
    words = pack_bytes([b"a", b"", b"longer"])
    path = make_object(words + b"\xff\xff\xff\xff")
    requests = [
        reading(place(path, 0, len(words)), "BYTES", 1, 3),
        reading(place(path, 0, len(words) + 4), "BYTES", 1, 4),
        reading(place(path, 0, len(words)), "BYTES", 1, 2),
        reading(place(path, 0, len(words)), "BYTES", 1, 3),
    ]
    good = fetched(opened(), requests)
    assert good == [requests[0], requests[3]]
    assert join_inputs(good).tolist() == [[b"a", b"", b"longer"]] * 2
    with pytest.raises(WeirError, match=r"unexpected number of string elements 3 .*'IN' for model 'm', expecting 2"):
        opened().fetch(requests[2], GATEWAY)


def test_later_writes_of_a_client_have_no_effect(make_object: MakeObject) -> None:
    path = make_object(bytes(16))
    (request,) = fetched(opened(), [reading(place(path, 0, 16), "FP32", 1, 4)])
    path.write_bytes(b"\xff" * 16)
    assert join_inputs([request]).tolist() == [[0.0] * 4]


def test_client_memory_must_be_allowed_and_on_the_same_host(make_object: MakeObject) -> None:
    ref = place(make_object(bytes(16)), 0, 16)
    for request in (reading(ref, "FP32", 1, 4), wanting(("OUT", ref))):
        for access, gateway in ((SharedMemoryAccess(), GATEWAY), (SharedMemoryAccess(True), "gateway-00000000-1")):
            with pytest.raises(WeirError) as refused:
                SharedMemoryIO(access).fetch(request, gateway)
            assert refused.value.code is ErrorCode.UNSUPPORTED
        opened().fetch(request, GATEWAY)


def test_an_input_beyond_the_size_limit_is_rejected(make_object: MakeObject) -> None:
    path = make_object(b"")
    with path.open("r+b") as file:
        file.truncate(3 << 30)  # of which no page exists
    with pytest.raises(WeirError, match="is larger than the 2147483647 that are read"):
        opened().fetch(reading(place(path, 0, 3 << 30), "UINT8", 1, 3 << 30), GATEWAY)


def test_outputs_are_written_to_their_regions(make_object: MakeObject) -> None:
    path = make_object(bytes(64))
    outputs = [Tensor("A", "UINT8", [4], b"aaaa"), Tensor("B", "UINT8", [2], b"bb"), Tensor("C", "UINT8", [1], b"c")]
    request = wanting(("A", place(path, 8, 4)), ("B", place(path, 32, 32)), ("C", None))
    result = Result(outputs)
    opened().deliver(request, result)
    assert result.error is None
    assert path.read_bytes() == bytes(8) + b"aaaa" + bytes(20) + b"bb" + bytes(30)
    assert [bytes(tensor.data) for tensor in outputs] == [b"", b"", b"c"]  # type: ignore[arg-type]


def test_no_output_is_written_if_one_does_not_fit(make_object: MakeObject) -> None:
    path = make_object(bytes(64))
    outputs = [Tensor("A", "UINT8", [4], b"aaaa"), Tensor("B", "UINT8", [3], b"bbb")]
    result = Result(outputs)
    opened().deliver(wanting(("A", place(path, 0, 4)), ("B", place(path, 32, 2))), result)
    assert result.error is not None
    assert result.error.code is ErrorCode.INTERNAL
    assert result.error.message == (
        "shared memory size specified with the request for output 'B' (2 bytes) should be at least 3 bytes to hold the "
        "results"
    )
    gone = place(path, 0, 4)
    path.unlink()
    result = Result(outputs)
    opened().deliver(wanting(("A", gone)), result)
    assert result.error is not None
    assert result.error.message.startswith("failed to write output 'A': Unable to open shared memory region")


def test_content_that_was_not_read_can_not_be_joined(make_object: MakeObject) -> None:
    requests = [reading(place(make_object(bytes(16)), 0, 16), "FP32", 1, 4)] * 2
    with pytest.raises(WeirError, match="has not been fetched"):
        join_inputs(requests)


def test_other_contents_are_not_contiguous() -> None:
    buffer = np.zeros(16, np.uint8).data
    assert contiguous_view([buffer[:8], buffer[8:]]) == buffer
    for contents in ([b"ab", b"cd"], [buffer[8:], buffer[:8]], [buffer[:4], buffer[5:]], [buffer[:4], b"x"]):
        assert contiguous_view(contents) is None
    assert contiguous_view([memoryview(b"ab"), memoryview(b"cd")]) is None

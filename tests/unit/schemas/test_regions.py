"""Regions: which places lie inside, and how they and references to them travel."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.bodies import pack_body, unpack_body
from schemas.errors import ErrorCode, WeirError
from schemas.messages import pack_answer, pack_answers, unpack_answers
from schemas.regions import (
    CUDA,
    SYSTEM,
    CudaOpening,
    Region,
    pack_cuda_opened,
    pack_cuda_opening,
    pack_region,
    unpack_cuda_opened,
    unpack_cuda_opening,
    unpack_region,
)
from schemas.requests import InferRequest, RequestedOutput
from schemas.tensors import ClientRef, CudaRegionRef, PayloadRef, RegionRef, Tensor
from schemas.wire import MalformedMessage

SYSTEM_REGION = Region(SYSTEM, "r", 100, "/key", 50, "key", 7)
CUDA_REGION = Region(CUDA, "g", 100, device_id=1, handle=b"h" * 64)

numbers = st.integers(0, 300) | st.integers(0, 2**64 - 1)


@given(region=st.sampled_from([SYSTEM_REGION, CUDA_REGION]), offset=numbers, size=numbers)
def test_a_place_lies_inside_its_region(region: Region, offset: int, size: int) -> None:
    if not 0 < offset + size <= 100 or offset == 100:
        with pytest.raises(WeirError) as refused:
            region.place(offset, size)
        assert refused.value.code is ErrorCode.INVALID_ARG
        return
    place = region.place(offset, size)
    assert place.size == size
    assert place.offset == (offset + 50 if region is SYSTEM_REGION else offset)


def test_places_name_what_was_registered() -> None:
    assert SYSTEM_REGION.place(10, 20) == RegionRef("key", 7, 60, 20)
    assert CUDA_REGION.place(10, 20) == CudaRegionRef(b"h" * 64, 1, 10, 20)


@pytest.mark.parametrize("region", [SYSTEM_REGION, CUDA_REGION])
def test_regions_travel(region: Region) -> None:
    assert unpack_region(pack_region(region)) == region


@pytest.mark.parametrize(
    "row",
    [
        [],
        [1],
        [2, SYSTEM, "r", 1, "", 0, "", 0, 0, b""],
        [1, "disk", "r", 1, "", 0, "", 0, 0, b""],
        [1, SYSTEM, 5, 1, "", 0, "", 0, 0, b""],
        [1, SYSTEM, "r", -1, "", 0, "", 0, 0, b""],
        [1, SYSTEM, "r", 1, "", 0, "", True, 0, b""],
        [1, SYSTEM, "r", 1, "", 0, "", 0, 0, "h"],
        [1, SYSTEM, "r", 1, "", 0, "", 0, 0, b"", 1],
        7,
    ],
)
def test_what_is_no_region(row: object) -> None:
    for unpack in (unpack_region, unpack_cuda_opening, unpack_cuda_opened):
        with pytest.raises(MalformedMessage):
            unpack(msgpack.packb(row))
        with pytest.raises(MalformedMessage):
            unpack(b"\xc1")


def test_questions_for_gpu_memory_travel() -> None:
    opening = CudaOpening(b"h" * 64, 1, 100)
    assert unpack_cuda_opening(pack_cuda_opening(opening)) == opening
    assert unpack_cuda_opened(pack_cuda_opened("w", "no")) == ("w", "no")


@pytest.mark.parametrize("place", [RegionRef("key", 7, 60, 8 << 30), CudaRegionRef(b"h" * 64, 1, 0, 8 << 30)])
def test_a_body_carries_references_alone(place: ClientRef) -> None:
    request = InferRequest("m", inputs=[Tensor("IN", "UINT8", [8 << 30], place)])
    request.outputs = [RequestedOutput("OUT"), RequestedOutput("OTHER")]
    request.outputs[0].region = place
    body = pack_body(request)
    assert len(body) < 300
    unpacked = unpack_body(body, "m", 1)
    assert unpacked.inputs[0].data == place
    assert type(unpacked.inputs[0].data) is type(place)
    assert [(output.name, output.region) for output in unpacked.outputs] == [("OUT", place), ("OTHER", None)]


@pytest.mark.parametrize(
    "place",
    [
        [],
        ["key", 7, 0],
        ["key", -7, 0, 1],
        ["key", 7, -1, 1],
        ["key", 7, 0, -1],
        ["key", 7, 0, True],
        [7, 7, 0, 1],
        ["key", 7, 0, 1, 1, 1],
        [b"h", "7", 0, 1],
    ],
)
def test_what_is_no_reference(place: list[object]) -> None:
    request = InferRequest("m", inputs=[Tensor("IN", "UINT8", [1], b"x")], outputs=[RequestedOutput("OUT")])
    fields = msgpack.unpackb(pack_body(request))
    for position, row in ((2, ["IN", "UINT8", [1], place]), (3, ["OUT", place])):
        with pytest.raises(MalformedMessage):
            unpack_body(msgpack.packb([*fields[:position], [row], *fields[position + 1 :]]), "m", 1)


def test_outputs_go_to_no_payload_slot_and_answers_come_from_no_region() -> None:
    request = InferRequest("m", outputs=[RequestedOutput("OUT")])
    request.outputs[0].region = PayloadRef("weir-x.1", 0, 0, 0, 1)  # type: ignore[assignment]
    with pytest.raises(MalformedMessage):
        unpack_body(pack_body(request), "m", 1)
    answer = pack_answer(1, [Tensor("OUT", "UINT8", [1], RegionRef("key", 7, 0, 1))])
    with pytest.raises(MalformedMessage):
        unpack_answers(pack_answers(1, [answer]))

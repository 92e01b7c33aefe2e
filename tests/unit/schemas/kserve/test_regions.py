"""Regions: which places lie inside, and how they and references to them travel."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.requests import InferRequest, RequestedOutput
from weir.schemas.core.tensors import ClientRef, CudaRegionRef, PayloadRef, RegionRef, Tensor
from weir.schemas.kserve.regions import CUDA, SYSTEM, CudaOpened, CudaOpening, Region
from weir.schemas.wire.calls import pack_response, pack_responses, unpack_responses
from weir.schemas.wire.codec import WIRE_VERSION, MalformedMessage, Message
from weir.schemas.wire.request_body import pack_body, unpack_body

SYSTEM_REGION = Region(SYSTEM, "r", 100, "/key", 50, "key", 7)
CUDA_REGION = Region(CUDA, "g", 100, device_id=1, handle=b"h" * 64)

numbers = st.integers(0, 300) | st.integers(0, 2**64 - 1)


@given(region=st.sampled_from([SYSTEM_REGION, CUDA_REGION]), offset=numbers, size=numbers)
def test_a_reference_lies_inside_its_region(region: Region, offset: int, size: int) -> None:
    if not 0 < offset + size <= 100 or offset == 100:
        with pytest.raises(WeirError) as refused:
            region.place(offset, size)
        assert refused.value.code is ErrorCode.INVALID_ARG
        return
    place = region.place(offset, size)
    assert place.size == size
    assert place.offset == (offset + 50 if region is SYSTEM_REGION else offset)


def test_references_name_the_registered_object() -> None:
    assert SYSTEM_REGION.place(10, 20) == RegionRef("key", 7, 60, 20)
    assert CUDA_REGION.place(10, 20) == CudaRegionRef(b"h" * 64, 1, 10, 20)


@pytest.mark.parametrize("region", [SYSTEM_REGION, CUDA_REGION])
def test_regions_survive_packing(region: Region) -> None:
    assert Region.unpack(region.pack()) == region


@pytest.mark.parametrize(
    "row",
    [
        [],
        [1],
        [WIRE_VERSION + 1, SYSTEM, "r", 1, "", 0, "", 0, 0, b""],
        [WIRE_VERSION, "disk", "r", 1, "", 0, "", 0, 0, b""],
        [WIRE_VERSION, SYSTEM, 5, 1, "", 0, "", 0, 0, b""],
        [WIRE_VERSION, SYSTEM, "r", -1, "", 0, "", 0, 0, b""],
        [WIRE_VERSION, SYSTEM, "r", 1, "", 0, "", True, 0, b""],
        [WIRE_VERSION, SYSTEM, "r", 1, "", 0, "", 0, 0, "h"],
        7,
    ],
)
def test_malformed_regions(row: object) -> None:
    with pytest.raises(MalformedMessage):
        Region.unpack(msgpack.packb(row))


def test_requests_to_map_gpu_memory_survive_packing() -> None:
    opening = CudaOpening(b"h" * 64, 1, 100)
    assert CudaOpening.unpack(opening.pack()) == opening
    opened = CudaOpened("w", "no")
    assert CudaOpened.unpack(opened.pack()) == opened


@pytest.mark.parametrize(
    ("message", "row"),
    [
        (CudaOpening, [WIRE_VERSION, "h", 1, 100]),
        (CudaOpening, [WIRE_VERSION, b"h", True, 100]),
        (CudaOpening, [WIRE_VERSION, b"h", 1]),
        (CudaOpened, [WIRE_VERSION, 5, "no"]),
        (CudaOpened, [WIRE_VERSION, "w", b"no"]),
        (CudaOpened, [WIRE_VERSION + 1, "w", "no"]),
    ],
)
def test_malformed_requests_to_map_gpu_memory(message: type[Message], row: list[object]) -> None:
    with pytest.raises(MalformedMessage):
        message.unpack(msgpack.packb(row))


@pytest.mark.parametrize("place", [RegionRef("key", 7, 60, 8 << 30), CudaRegionRef(b"h" * 64, 1, 0, 8 << 30)])
def test_a_body_has_references_instead_of_content(place: ClientRef) -> None:
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
def test_malformed_references(place: list[object]) -> None:
    request = InferRequest("m", inputs=[Tensor("IN", "UINT8", [1], b"x")], outputs=[RequestedOutput("OUT")])
    fields = msgpack.unpackb(pack_body(request))
    for position, row in ((2, ["IN", "UINT8", [1], place]), (3, ["OUT", place])):
        with pytest.raises(MalformedMessage):
            unpack_body(msgpack.packb([*fields[:position], [row], *fields[position + 1 :]]), "m", 1)


def test_outputs_need_regions_and_responses_need_slots() -> None:
    request = InferRequest("m", outputs=[RequestedOutput("OUT")])
    request.outputs[0].region = PayloadRef("weir-x.1", 0, 0, 0, 1)  # type: ignore[assignment]
    with pytest.raises(MalformedMessage):
        unpack_body(pack_body(request), "m", 1)
    answer = pack_response(1, [Tensor("OUT", "UINT8", [1], RegionRef("key", 7, 0, 1))])
    with pytest.raises(MalformedMessage):
        unpack_responses(pack_responses(1, [answer]))

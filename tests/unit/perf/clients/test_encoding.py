"""Requests as each protocol carries them: read back by the server's own readers, and by protobuf."""

from __future__ import annotations

import msgspec
import pytest
from tritonclient.grpc import service_pb2

from weir.perf.clients.addresses import ServerAddress
from weir.perf.clients.bodies import infer_body
from weir.perf.clients.grpc import GrpcClient
from weir.perf.clients.session import RegionPlace, SampleRequest
from weir.perf.load.sequences import SequenceStep
from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START, InferRequest
from weir.schemas.core.tensors import RegionRef, Tensor
from weir.schemas.kserve.request import parse_infer_request

ADDRESS = ServerAddress("localhost", 8001)
INPUTS = [Tensor("A", "INT32", [1, 2], b"12345678"), Tensor("B", "UINT8", [1, 1], b"x")]
REQUEST = InferRequest("m", inputs=INPUTS, parameters={"own": 3}, binary_default=True)
STEP = SequenceStep(77, 0, SEQUENCE_START)


def find_region(name: str, offset: int, size: int) -> RegionRef:
    return RegionRef(name, 0, offset, size)


def read_back(sample: SampleRequest) -> InferRequest:
    chunks, header_length = infer_body(sample)
    return parse_infer_request("m", "", b"".join(chunks), header_length, find_region=find_region)


def test_a_body_carries_all_of_a_request() -> None:
    found = read_back(SampleRequest(REQUEST))
    assert [(t.name, t.datatype, list(t.shape), bytes(t.data)) for t in found.inputs] == [  # type: ignore[arg-type]
        ("A", "INT32", [1, 2], b"12345678"),
        ("B", "UINT8", [1, 1], b"x"),
    ]
    assert (found.parameters, found.binary_default, found.correlation_id) == ({"own": 3}, True, 0)


def test_a_body_carries_the_step_of_a_sequence() -> None:
    found = read_back(SampleRequest(REQUEST).at(STEP))
    assert (found.correlation_id, found.sequence_flags) == (77, SEQUENCE_START)
    assert REQUEST.correlation_id == 0


def test_a_body_names_places_in_shared_memory() -> None:
    found = read_back(SampleRequest(REQUEST, {"A": RegionPlace("r", 64, 8)}))
    assert found.inputs[0].data == find_region("r", 64, 8)
    assert bytes(found.inputs[1].data) == b"x"  # type: ignore[arg-type]


def grpc_message(
    sample: SampleRequest, step: SequenceStep | None = None, streams: bool = False
) -> service_pb2.ModelInferRequest:
    client = GrpcClient(ADDRESS, "m", "2", {}, 1.0, streams)
    client.load([sample])
    return service_pb2.ModelInferRequest.FromString(client.encoded(0, step))


def test_a_message_carries_all_of_a_request() -> None:
    message = grpc_message(SampleRequest(REQUEST))
    assert (message.model_name, message.model_version) == ("m", "2")
    assert [(row.name, row.datatype, list(row.shape)) for row in message.inputs] == [
        ("A", "INT32", [1, 2]),
        ("B", "UINT8", [1, 1]),
    ]
    assert list(message.raw_input_contents) == [b"12345678", b"x"]
    assert message.parameters["own"].int64_param == 3
    assert "triton_enable_empty_final_response" not in message.parameters
    assert (
        grpc_message(SampleRequest(REQUEST), streams=True).parameters["triton_enable_empty_final_response"].bool_param
    )


@pytest.mark.parametrize("correlation_id", [77, "perf-77"])
def test_a_message_joined_with_a_step_is_one_message(correlation_id: int | str) -> None:
    step = SequenceStep(correlation_id, 3, SEQUENCE_END)
    message = grpc_message(SampleRequest(REQUEST), step)
    found = message.parameters["sequence_id"]
    assert (found.string_param if isinstance(correlation_id, str) else found.int64_param) == correlation_id
    assert not message.parameters["sequence_start"].bool_param
    assert message.parameters["sequence_end"].bool_param
    assert message.parameters["own"].int64_param == 3
    assert list(message.raw_input_contents) == [b"12345678", b"x"]


def test_a_message_names_places_in_shared_memory() -> None:
    message = grpc_message(SampleRequest(REQUEST, {"B": RegionPlace("r", 64, 1)}))
    parameters = message.inputs[1].parameters
    assert parameters["shared_memory_region"].string_param == "r"
    assert (parameters["shared_memory_offset"].int64_param, parameters["shared_memory_byte_size"].int64_param) == (
        64,
        1,
    )
    assert list(message.raw_input_contents) == [b"12345678"]


def test_samples_do_not_share_what_a_step_changes() -> None:
    sample = SampleRequest(msgspec.structs.replace(REQUEST))
    assert read_back(sample.at(STEP)).correlation_id == 77
    assert read_back(sample).correlation_id == 0

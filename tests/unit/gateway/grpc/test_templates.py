"""A request with a cached header is packed as if it had been parsed."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from tests.support.gateway.grpc_frontend import MODELS, model
from weir.calls.catalog import ServedModel
from weir.calls.request_templates import MAX_HEADERS
from weir.gateway.grpc.codec import decode_request, request_from_message
from weir.gateway.grpc.templates import MessageTemplates
from weir.schemas.core.requests import InferRequest
from weir.schemas.wire.request_body import pack_body


def wire(name: str, *contents: bytes, **fields: Any) -> bytes:
    """A request for a model with FP32 inputs of as many elements as the contents have."""
    names = [given.name for given in MODELS[name].config.input]
    inputs = [
        {"name": given, "datatype": "FP32", "shape": [1, len(content) // 4]}
        for given, content in zip(names, contents, strict=True)
    ]
    message = service_pb2.ModelInferRequest(model_name=name, inputs=inputs, raw_input_contents=contents, **fields)
    data: bytes = message.SerializeToString()
    return data


def parse(data: bytes) -> tuple[InferRequest, Any]:
    message, contents = decode_request(data)
    request = request_from_message(message, contents)
    MODELS[request.model_name].normalizer.normalize(request)
    return request, contents


def keep(prepared: MessageTemplates, data: bytes, served: ServedModel | None = None) -> None:
    request, contents = parse(data)
    prepared.keep_message(request, served or MODELS[request.model_name], data, contents)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Two requests with the same header."""
    name = draw(st.sampled_from(["same_FP32", "add_sub"]))
    count = len(MODELS[name].config.input)
    sizes = [4 * draw(st.integers(1, 60))] * count
    fields = draw(st.sampled_from([{}, {"model_version": "1"}, {"parameters": {"k": {"string_param": "v"}}}]))
    first, second = ([draw(st.binary(min_size=size, max_size=size)) for size in sizes] for _ in range(2))
    return wire(name, *first, **fields), wire(name, *second, **fields)


@given(pairs())
@settings(deadline=None)
def test_another_content_is_packed_as_if_it_had_been_parsed(pair: tuple[bytes, bytes]) -> None:
    prepared = MessageTemplates()
    keep(prepared, pair[0])
    found = prepared.find_message(pair[1])
    assert found is not None
    assert found.pack(pair[1]) == pack_body(parse(pair[1])[0])


@given(pairs(), st.data())
@settings(deadline=None)
def test_a_changed_header_is_not_found(pair: tuple[bytes, bytes], data: st.DataObject) -> None:
    prepared = MessageTemplates()
    keep(prepared, pair[0])
    found = prepared.find_message(pair[0])
    assert found is not None
    outside = [at for at in range(len(pair[1])) if not any(s <= at < e for s, e in zip(found._starts, found._ends))]  # noqa: B905
    changed = bytearray(pair[1])
    changed[data.draw(st.sampled_from(outside))] ^= data.draw(st.integers(1, 255))
    assert prepared.find_message(bytes(changed)) is None


def test_another_length_is_not_found() -> None:
    prepared = MessageTemplates()
    keep(prepared, wire("same_FP32", bytes(8)))
    assert prepared.find_message(wire("same_FP32", bytes(12))) is None
    assert prepared.find_message(b"") is None


def test_what_cannot_be_prepared_is_not_kept() -> None:
    prepared = MessageTemplates()
    contents_first = wire("same_FP32", bytes(8))
    head, content = contents_first[:-10], contents_first[-10:]
    typed = service_pb2.ModelInferRequest(
        model_name="same_FP32",
        inputs=[{"name": "IN", "datatype": "FP32", "shape": [1, 1], "contents": {"fp32_contents": [1.0]}}],
    ).SerializeToString()
    for data in [
        wire("same_FP32", bytes(8), id="r1"),
        wire("same_FP32", bytes(8), parameters={"sequence_id": {"int64_param": 7}}),
        typed,
        content + head,
    ]:
        keep(prepared, data)
        assert prepared.find_message(data) is None


def test_a_model_that_has_changed_is_forgotten_and_the_others_are_not() -> None:
    prepared = MessageTemplates()
    one, other = wire("same_FP32", bytes(8)), wire("add_sub", bytes(4), bytes(4))
    keep(prepared, one, model("same_FP32", "FP32", ["IN"], ["OUT"]))
    keep(prepared, other)
    found = prepared.find_message(one)
    assert found is not None
    assert found.owner is not MODELS["same_FP32"]
    prepared.forget(found.owner)
    assert prepared.find_message(one) is None
    assert prepared.find_message(other) is not None


def test_a_client_whose_headers_all_differ_does_not_displace_others() -> None:
    prepared = MessageTemplates()
    steady = wire("same_FP32", bytes(8))
    keep(prepared, steady)
    for number in range(600):
        keep(prepared, wire("same_FP32", bytes(8), parameters={"changing": {"int64_param": number}}))
        if number % 50 == 0:
            assert prepared.find_message(steady) is not None
    newcomer = wire("add_sub", bytes(4), bytes(4))
    for _ in range(2):
        keep(prepared, newcomer)
    assert prepared.find_message(newcomer) is not None
    assert prepared.find_message(steady) is not None


def test_a_header_that_gets_no_template_does_not_hide_one_of_messages_of_the_same_length() -> None:
    prepared = MessageTemplates()
    steady = wire("same_FP32", bytes(80))
    keep(prepared, steady)
    for number in range(MAX_HEADERS):
        keep(prepared, wire("same_FP32", bytes(8), parameters={"changing": {"int64_param": number}}))
    others = [wire("same_FP32", bytes(8), parameters={"k" * size: {"bool_param": True}}) for size in range(80)]
    keep(prepared, next(other for other in others if len(other) == len(steady)))
    assert prepared.find_message(steady) is not None

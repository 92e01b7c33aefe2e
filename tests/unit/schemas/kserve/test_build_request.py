import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.schemas.core.requests import SEQUENCE_END, SEQUENCE_START, InferRequest, RequestedOutput
from weir.schemas.core.tensors import RegionRef, Tensor
from weir.schemas.kserve.request import build_infer_request, parse_infer_request

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
VALUES = st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.integers(-(2**63), 2**63 - 1), st.booleans())


@st.composite
def requests(draw: st.DrawFn) -> InferRequest:
    request = InferRequest("m", "3", draw(st.sampled_from(["", "an id"])))
    for name in draw(st.lists(NAMES, unique=True, min_size=1, max_size=3)):
        content = draw(st.binary(min_size=1, max_size=20))
        request.inputs.append(Tensor(name, "UINT8", [len(content)], content))
    request.binary_default = draw(st.booleans())
    for name in draw(st.lists(NAMES, unique=True, max_size=2)):
        request.outputs.append(RequestedOutput(name, draw(st.booleans()), draw(st.integers(0, 3))))
    own = st.dictionaries(st.sampled_from(["a", "b"]), VALUES)
    request.parameters = draw(own) or None
    request.priority = draw(st.integers(0, 2**32))
    request.timeout_us = draw(st.integers(0, 2**40))
    request.correlation_id = draw(st.one_of(st.just(0), st.integers(1, 2**64 - 1), st.just("seq")))
    request.sequence_flags = draw(st.sampled_from([0, SEQUENCE_START, SEQUENCE_END, SEQUENCE_START | SEQUENCE_END]))
    return request


def told(request: InferRequest) -> list[object]:
    inputs = [(t.name, t.datatype, t.shape, bytes(t.data)) for t in request.inputs]  # type: ignore[arg-type]
    outputs = [(o.name, o.binary, o.class_count) for o in request.outputs]
    own = dict(request.parameters or {})
    return [
        request.id, inputs, outputs, own, request.binary_default, request.priority, request.timeout_us,
        request.correlation_id, request.sequence_flags,
    ]  # fmt: skip


@given(requests())
def test_built_requests_are_parsed_again(request: InferRequest) -> None:
    chunks, header_length = build_infer_request(request)
    again = parse_infer_request("m", "3", b"".join(chunks), header_length)
    if request.outputs:
        again.binary_default = request.binary_default
    assert told(again) == told(request)


def test_references_cannot_be_built() -> None:
    request = InferRequest("m", inputs=[Tensor("IN", "UINT8", [4], RegionRef("file", 1, 0, 4))])
    with pytest.raises(TypeError):
        build_infer_request(request)

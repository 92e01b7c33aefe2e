"""Repeated headers keep their templates, whatever other clients send."""

from __future__ import annotations

import pytest

from weir.bus.naming.identity import new_id
from weir.bus.payloads.arena import INLINE_LIMIT_BYTES, PayloadArena, PayloadBudget, Slot
from weir.calls import request_templates as prepared
from weir.calls.request_templates import MAX_HEADER_BYTES, MAX_HEADERS, MAX_KEPT_BYTES, RequestTemplates
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor
from weir.schemas.wire.request_body import pack_body

CONTENT = b"1234"


def body_of(header: bytes, content: bytes = CONTENT) -> bytes:
    return header + content


def request(header: bytes, content: bytes = CONTENT) -> InferRequest:
    tensor = Tensor("IN", "UINT8", [1, len(content)], memoryview(body_of(header, content))[len(header) :])
    return InferRequest("model", inputs=[tensor], parameters={"header": header.decode()})


def send(requests: RequestTemplates, header: bytes, content: bytes = CONTENT) -> bool:
    """Whether a request with this header was prepared; it is by the next one at the latest, where that may help."""
    body = body_of(header, content)
    found = requests.find("", body, len(header))
    if found is None:
        requests.keep(request(header, content), body, len(header))
        return False
    assert found.pack(body) == pack_body(request(header, content))
    return True


def test_a_repeated_header_uses_its_template() -> None:
    requests = RequestTemplates()
    assert not send(requests, b"a")
    assert send(requests, b"a", b"5678")
    assert not send(requests, b"b")
    assert not send(requests, b"a", b"longer"), "the header asks for another length"


def test_headers_that_never_repeat_do_not_displace_others() -> None:
    requests = RequestTemplates()
    send(requests, b"old")
    for number in range(20 * MAX_HEADERS):
        send(requests, b"changing %d" % number)
        if number % 50 == 0:
            assert send(requests, b"old"), "it is used all the time"
    newcomers = [b"new %d" % number for number in range(8)]
    for header in newcomers:
        send(requests, header)
        send(requests, header)
    assert all(send(requests, header) for header in newcomers)
    assert send(requests, b"old")
    assert len(requests._templates) <= MAX_HEADERS
    assert len(requests._seen_once) <= prepared.MAX_SIGHTINGS


def test_more_headers_than_fit_still_use_templates() -> None:
    requests = RequestTemplates()
    popular = [b"popular %d" % number for number in range(MAX_HEADERS // 2)]
    rare = [b"rare %d" % number for number in range(2 * MAX_HEADERS)]
    for _ in range(4):
        for at, header in enumerate(rare):
            send(requests, header)
            send(requests, popular[at % len(popular)])
    assert sum(send(requests, header) for header in popular) > 0.9 * len(popular)


def test_templates_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = RequestTemplates()
    headers = [b"%d" % number + bytes([65]) * (MAX_HEADER_BYTES - 8) for number in range(MAX_HEADERS)]
    for header in 2 * headers:
        send(requests, header)
    assert len(requests._templates) < MAX_HEADERS
    kept = sum(each.size_bytes for each in requests._templates.values())
    assert kept == requests._size_bytes <= MAX_KEPT_BYTES
    assert not send(requests, b"x" * (MAX_HEADER_BYTES + 1))
    assert not send(requests, b"x" * (MAX_HEADER_BYTES + 1)), "too long to be kept"


def test_a_template_does_not_keep_content() -> None:
    requests = RequestTemplates()
    for header in (b"a", b"b"):
        send(requests, header, bytes(16_000))
    contents = [each.request.inputs[0].data for each in requests._templates.values()]
    assert all(isinstance(each, memoryview) and len(each) == 16_000 for each in contents)
    assert contents[0].obj is contents[1].obj  # type: ignore[union-attr]


def test_a_body_in_a_payload_slot_is_referred_to() -> None:
    requests = RequestTemplates()
    arena = PayloadArena(new_id("gateway"), 1 << 22, PayloadBudget(1 << 22))
    header, large, small, offset = b"{header}", bytes(INLINE_LIMIT_BYTES + 1), b"1234", 56
    body = header + large + small
    slots = [arena.allocate(offset + len(body)) for _ in range(2)]

    def placed(slot: Slot | None) -> tuple[InferRequest, Slot, memoryview]:
        assert slot is not None
        slot.view[offset : offset + len(body)] = body
        content = slot.view[offset : offset + len(body)]
        start = len(header) + len(large)
        inputs = [
            Tensor("LARGE", "UINT8", [1, len(large)], slot.ref(offset + len(header), len(large))),
            Tensor("SMALL", "UINT8", [1, len(small)], content[start:]),
        ]
        return InferRequest("model", inputs=inputs), slot, content

    try:
        first, _, content = placed(slots[0])
        assert requests.find("", content, len(header)) is None
        requests.keep(first, content, len(header))
        second, slot, content = placed(slots[1])
        found = requests.find("", content, len(header))
        assert found is not None
        assert found.refers
        assert found.pack_in_slot(slot, offset) == pack_body(second)
        assert requests.find("", content[:-1], len(header)) is None
    finally:
        arena.close()

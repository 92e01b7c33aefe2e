"""The local cache against a model of it, cache keys, and the options of caches."""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.calls.cache.config import CacheConfig
from weir.calls.cache.response_cache import cache_key
from weir.calls.cache.stores import CachedOutput, CachedResponse, LocalCache
from weir.schemas.core.errors import invalid
from weir.schemas.core.requests import InferRequest, RequestedOutput
from weir.schemas.core.tensors import PayloadRef, Tensor
from weir.schemas.wire.calls import pack_error, pack_response, pack_responses
from weir.schemas.wire.codec import MalformedMessage


def answer(content: bytes, version: int = 1) -> CachedResponse:
    return CachedResponse(version, (CachedOutput("OUT", "UINT8", (len(content),), content),), None)


KEYS = st.integers(0, 9).map(lambda number: bytes([number]))
EVENTS = st.lists(st.tuples(KEYS, st.one_of(st.none(), st.integers(0, 3000))), max_size=120)


@settings(deadline=None)
@given(EVENTS, st.integers(300, 6000))
def test_the_local_cache_drops_the_least_recently_used_responses(
    events: list[tuple[bytes, int | None]], size_bytes: int
) -> None:
    cache = LocalCache(size_bytes)
    expected: OrderedDict[bytes, CachedResponse] = OrderedDict()
    for key, length in events:
        if length is None:
            assert cache.find(key) == expected.get(key)
            if key in expected:
                expected.move_to_end(key)
        else:
            inserted = answer(bytes(length))
            fits = inserted.size_bytes <= size_bytes
            assert cache.insert(key, inserted) == fits
            if fits:
                expected.pop(key, None)
                expected[key] = inserted
            while sum(kept.size_bytes for kept in expected.values()) > size_bytes:
                expected.popitem(last=False)
        assert cache.used_bytes == sum(kept.size_bytes for kept in expected.values()) <= size_bytes
        assert len(cache) == len(expected)


def test_the_size_of_an_entry_covers_its_memory() -> None:
    import tracemalloc

    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept = [answer(struct.pack("<I", number) * 25) for number in range(1000)]
    cache = LocalCache(1 << 30)
    for number, one in enumerate(kept):
        cache.insert(number.to_bytes(32), one)
    del kept, one
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert used <= cache.used_bytes


def request(
    inputs: list[tuple[str, str, list[int], bytes]], outputs: list[str], parameters: Any = None
) -> InferRequest:
    tensors = [Tensor(name, datatype, shape, data) for name, datatype, shape, data in inputs]
    return InferRequest("m", "", "id", tensors, [RequestedOutput(name) for name in outputs], parameters)


TENSORS = st.lists(
    st.tuples(
        st.sampled_from(["A", "B", "AB", ""]),
        st.sampled_from(["INT8", "UINT8"]),
        st.lists(st.integers(0, 3), max_size=2),
        st.binary(max_size=4),
    ),
    max_size=3,
    unique_by=lambda row: row[0],
)
QUESTIONS = st.tuples(
    st.sampled_from(["m", "n"]),
    st.integers(1, 2),
    st.sampled_from(["", "x"]),
    TENSORS,
    st.lists(st.sampled_from(["A", "B"]), unique=True, max_size=2),
    st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from([1, True, "1", 1.0, ""]), max_size=2),
)


@settings(max_examples=150, deadline=None)
@given(QUESTIONS, QUESTIONS, st.randoms())
def test_only_equal_requests_have_equal_keys(one: Any, other: Any, random: Any) -> None:
    def facts(question: Any) -> Any:
        *where, tensors, outputs, parameters = question
        return where, sorted(tensors), outputs, sorted((key, repr(value)) for key, value in parameters.items())

    def key(question: Any) -> bytes:
        model, version, load, tensors, outputs, parameters = question
        return cache_key(model, version, load, request(tensors, outputs, parameters))

    assert (key(one) == key(other)) == (facts(one) == facts(other))
    shuffled = list(one[3])
    random.shuffle(shuffled)
    assert key((*one[:3], shuffled, *one[4:])) == key(one), "the order of inputs says nothing"


def test_keys_ignore_how_content_and_missing_parameters_are_represented() -> None:
    plain = request([("A", "INT8", [2], b"ab")], [])
    viewed = request([("A", "INT8", [2], memoryview(b"ab"))], [], {})  # type: ignore[list-item]
    assert cache_key("m", 1, "x", plain) == cache_key("m", 1, "x", viewed)


def test_a_cached_response_survives_packing() -> None:
    kept = CachedResponse(3, (CachedOutput("A", "FP32", (1, 2), b"12345678"),), {"key": "value"})
    assert CachedResponse.unpack(kept.pack()) == kept
    response = kept.response("m", "7")
    assert (response.id, response.model_version, response.parameters) == ("7", "3", {"key": "value"})
    assert response.outputs[0].data is kept.outputs[0].data, "not copied"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"rubbish",
        pack_responses(1, []),
        pack_responses(1, [pack_error(0, invalid("no"))]),
        pack_responses(1, [(0, None, None, True, None)]),
        pack_responses(1, [pack_response(0, []), pack_response(1, [])]),
        pack_responses(1, [pack_response(0, [Tensor("A", "INT8", [1], PayloadRef("weir-x", 0, 1, 64, 1))])]),
    ],
)
def test_malformed_cached_responses(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        CachedResponse.unpack(data)


@pytest.mark.parametrize(
    ("texts", "config"),
    [
        ([], None),
        (["local,size=1048576"], CacheConfig("local", 1 << 20)),
        (["nats,size=5", "nats,ttl=60"], CacheConfig("nats", 5, 60)),
        (["nats,size=5,ttl=60"], CacheConfig("nats", 5, 60)),
    ],
)
def test_valid_cache_options(texts: list[str], config: CacheConfig | None) -> None:
    assert CacheConfig.parse(texts) == config


@pytest.mark.parametrize(
    ("texts", "complaint"),
    [
        (["local,size=1", "nats,size=1"], "found multiple cache configurations, but only a single cache is currently"),
        (["nats,ttl=1"], "config didn't contain a valid 'size' field."),
        (["local,size=0"], "'0' is not a valid 'size'"),
        (["local,size=1e6"], "'1e6' is not a valid 'size'"),
        (["local,ttl=5"], "cache 'local' has no setting 'ttl'"),
        (["redis,host=there"], "the cache 'redis' is not supported"),
        (["other,size=1"], "unable to find cache 'other'"),
    ],
)
def test_invalid_cache_options(texts: list[str], complaint: str) -> None:
    with pytest.raises(ValueError) as refused:
        CacheConfig.parse(texts)
    assert complaint in str(refused.value)

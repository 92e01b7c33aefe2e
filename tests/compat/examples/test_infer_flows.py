"""The requests of Triton's published infer examples through the stock clients, one test per example."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.support.clients.triton_examples import (
    COUNTING,
    GRPC,
    GRPC_AIO,
    HTTP,
    HTTP_AIO,
    ONES,
    as_text,
    assert_sums,
    connect,
    given,
    pair,
)
from tests.support.servers.weir_server import Server

BOTH = pytest.mark.parametrize("protocol", [HTTP, GRPC], ids=["http", "grpc"])
BOTH_AIO = pytest.mark.parametrize("protocol", [HTTP_AIO, GRPC_AIO], ids=["http", "grpc"])
WAIT_S = 20


# simple_http_infer_client, simple_http_aio_infer_client


def _mixed(protocol: ModuleType) -> tuple[list[Any], list[Any]]:
    """One tensor as JSON and one as binary, both ways."""
    inputs = [
        given(protocol, "INPUT0", COUNTING, "INT32", binary_data=False),
        given(protocol, "INPUT1", -ONES, "INT32", binary_data=True),
    ]
    outputs = [
        protocol.InferRequestedOutput("OUTPUT0", binary_data=True),
        protocol.InferRequestedOutput("OUTPUT1", binary_data=False),
    ]
    return inputs, outputs


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_http_infer(examples: Server, compression: str | None) -> None:
    inputs, outputs = _mixed(HTTP)
    options: dict[str, Any] = {
        "query_params": {"test_1": 1, "test_2": 2},
        "headers": {"Header": "Value"},
        "request_compression_algorithm": compression,
        "response_compression_algorithm": compression,
    }
    with connect(HTTP, examples) as client:
        result = client.infer("simple", inputs, outputs=outputs, **options)
        assert "data" not in result.get_output("OUTPUT0")
        assert "data" in result.get_output("OUTPUT1")
        assert len(client.get_inference_statistics(model_name="simple")["model_stats"]) == 1
        assert_sums(result, COUNTING, -ONES)
        assert_sums(client.infer("simple", inputs, outputs=None, **options), COUNTING, -ONES)
        with pytest.raises(InferenceServerException) as caught:
            client.infer("wrong_model_name", inputs, outputs=outputs)
        assert caught.value.message().startswith("Request for unknown model")


async def test_http_aio_infer(examples: Server) -> None:
    inputs, outputs = _mixed(HTTP_AIO)
    query = {"test_1": 1, "test_2": 2}
    async with connect(HTTP_AIO, examples) as client:
        result = await client.infer("simple", inputs, outputs=outputs, query_params=query)
        assert len((await client.get_inference_statistics(model_name="simple"))["model_stats"]) == 1
        assert_sums(result, COUNTING, -ONES)
        assert_sums(await client.infer("simple", inputs, outputs=None, query_params=query), COUNTING, -ONES)
        with pytest.raises(InferenceServerException) as caught:
            await client.infer("wrong_model_name", inputs, outputs=outputs)
        assert caught.value.message().startswith("Request for unknown model")
        together = await asyncio.gather(
            client.infer("simple", inputs, outputs=outputs, query_params=query),
            client.infer("simple", inputs, outputs=None, query_params=query),
        )
        for result in together:
            assert_sums(result, COUNTING, -ONES)


# simple_grpc_infer_client, simple_grpc_aio_infer_client


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_grpc_infer(examples: Server, compression: str | None) -> None:
    inputs, outputs = pair(GRPC)
    with connect(GRPC, examples) as client:
        result = client.infer(
            "simple",
            inputs,
            outputs=outputs,
            client_timeout=WAIT_S,
            headers={"test": "1"},
            compression_algorithm=compression,
        )
        assert len(client.get_inference_statistics(model_name="simple").model_stats) == 1
        assert_sums(result)
        assert_sums(client.infer("simple", inputs, outputs=None, compression_algorithm=compression))


async def test_grpc_aio_infer(examples: Server) -> None:
    inputs, outputs = pair(GRPC_AIO)
    async with connect(GRPC_AIO, examples) as client:
        result = await client.infer("simple", inputs, outputs=outputs, headers={"test": "1"})
        assert len((await client.get_inference_statistics(model_name="simple")).model_stats) == 1
        assert_sums(result)
        for result in await asyncio.gather(*(client.infer("simple", inputs, outputs=None) for _ in range(2))):
            assert_sums(result)


# simple_http_async_infer_client, simple_grpc_async_infer_client


def test_http_async_infer(examples: Server) -> None:
    inputs, outputs = pair(HTTP)
    with connect(HTTP, examples, concurrency=2) as client:
        asked = [client.async_infer("simple", inputs, outputs=outputs) for _ in range(2)]
        for one in asked:
            assert_sums(one.get_result())


def test_grpc_async_infer(examples: Server) -> None:
    inputs, outputs = pair(GRPC)
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with connect(GRPC, examples) as client:
        client.async_infer(
            "simple", inputs, callback=lambda result, error: answers.put((result, error)), outputs=outputs
        )
        result, error = answers.get(timeout=WAIT_S)
    assert error is None
    assert_sums(result)


# simple_grpc_keepalive_client, simple_grpc_custom_args_client, and both for aio

KEEPALIVE: dict[str, Any] = {
    "keepalive_time_ms": 2**31 - 1,
    "keepalive_timeout_ms": 20000,
    "keepalive_permit_without_calls": False,
    "http2_max_pings_without_data": 2,
}
CHANNEL_ARGS = [
    ("grpc.max_send_message_length", 1 << 20),
    ("grpc.max_receive_message_length", 1 << 20),
    ("grpc.keepalive_time_ms", 2**31 - 1),
    ("grpc.keepalive_timeout_ms", 20000),
    ("grpc.keepalive_permit_without_calls", False),
    ("grpc.http2.max_pings_without_data", 2),
    ("grpc.dns_enable_srv_queries", 1),
]


def _channel_options(protocol: ModuleType) -> list[dict[str, Any]]:
    eager = {**KEEPALIVE, "keepalive_time_ms": 1000, "keepalive_permit_without_calls": True}
    return [
        {"keepalive_options": protocol.KeepAliveOptions(**KEEPALIVE)},
        {"keepalive_options": protocol.KeepAliveOptions(**eager)},
        {"channel_args": CHANNEL_ARGS},
    ]


@pytest.mark.parametrize("which", [0, 1, 2], ids=["keepalive", "eager_keepalive", "custom_args"])
def test_grpc_channel_options(examples: Server, which: int) -> None:
    inputs, outputs = pair(GRPC)
    with connect(GRPC, examples, **_channel_options(GRPC)[which]) as client:
        assert_sums(client.infer("simple", inputs, outputs=outputs, headers={"test": "1"}))


@pytest.mark.parametrize("which", [0, 2], ids=["keepalive", "custom_args"])
async def test_grpc_aio_channel_options(examples: Server, which: int) -> None:
    inputs, outputs = pair(GRPC_AIO)
    async with connect(GRPC_AIO, examples, **_channel_options(GRPC_AIO)[which]) as client:
        assert_sums(await client.infer("simple", inputs, outputs=outputs, headers={"test": "1"}))


# simple_http_string_infer_client, simple_grpc_string_infer_client, and both for aio

WITH_NUL = np.array([[b"he\x00llo"] * 16], np.object_)
BLOBS = np.array([[b"\x00\x01\x02\x03"] * 16], np.bytes_)


def _string_requests(protocol: ModuleType) -> Iterator[tuple[str, list[Any], list[Any], np.ndarray | None]]:
    """(model, inputs, outputs, the expected OUTPUT0; None for sums) of each request."""
    kinds: list[dict[str, bool]]
    kinds = [{"binary_data": True}, {"binary_data": False}] if protocol in (HTTP, HTTP_AIO) else [{}]
    inputs, outputs = [], []
    for number, array in enumerate((COUNTING, ONES)):
        kind = kinds[number % len(kinds)]
        inputs.append(given(protocol, f"INPUT{number}", as_text(array), "BYTES", **kind))
        outputs.append(protocol.InferRequestedOutput(f"OUTPUT{number}", **kind))
    yield "simple_string", inputs, outputs, None
    for array in (WITH_NUL, BLOBS):
        for kind in kinds:
            inputs = [given(protocol, "INPUT0", array, "BYTES", **kind)]
            yield "simple_identity", inputs, [protocol.InferRequestedOutput("OUTPUT0", **kind)], array


def _assert_strings(result: Any, expected: np.ndarray | None) -> None:
    if expected is None:
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0").astype(np.int32), COUNTING + ONES)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT1").astype(np.int32), COUNTING - ONES)
    else:
        answered = [item if isinstance(item, bytes) else item.encode() for item in result.as_numpy("OUTPUT0").ravel()]
        # numpy's own bytes type drops NUL characters at the end, and these arrays have none there.
        assert answered == [bytes(item) for item in expected.ravel()]
        assert result.as_numpy("OUTPUT0").shape == expected.shape


@BOTH
def test_string_infer(examples: Server, protocol: ModuleType) -> None:
    with connect(protocol, examples) as client:
        for model, inputs, outputs, expected in _string_requests(protocol):
            _assert_strings(client.infer(model_name=model, inputs=inputs, outputs=outputs), expected)


@BOTH_AIO
async def test_aio_string_infer(examples: Server, protocol: ModuleType) -> None:
    async with connect(protocol, examples) as client:
        for model, inputs, outputs, expected in _string_requests(protocol):
            _assert_strings(await client.infer(model_name=model, inputs=inputs, outputs=outputs), expected)

"""The requests that Triton's published client examples have in common, for each of the four stock clients."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio

from tests.support.servers.weir_server import Server

HTTP, GRPC = tritonclient.http, tritonclient.grpc
HTTP_AIO, GRPC_AIO = tritonclient.http.aio, tritonclient.grpc.aio

COUNTING = np.arange(16, dtype=np.int32).reshape(1, 16)
ONES = np.ones((1, 16), np.int32)


def connect(protocol: ModuleType, server: Server, **options: Any) -> Any:
    """A client of this module, for a `with` statement or, of the aio ones, `async with`."""
    place = server.http_place if protocol in (HTTP, HTTP_AIO) else server.grpc_place
    return protocol.InferenceServerClient(place, **options)


def given(protocol: ModuleType, name: str, array: np.ndarray, datatype: str, **options: Any) -> Any:
    """An input that carries its content."""
    tensor = protocol.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, **options)
    return tensor


def pair(protocol: ModuleType, first: np.ndarray = COUNTING, second: np.ndarray = ONES) -> tuple[list[Any], list[Any]]:
    """Inputs and requested outputs for the model `simple`."""
    inputs = [given(protocol, "INPUT0", first, "INT32"), given(protocol, "INPUT1", second, "INT32")]
    return inputs, [protocol.InferRequestedOutput("OUTPUT0"), protocol.InferRequestedOutput("OUTPUT1")]


def assert_sums(result: Any, first: np.ndarray = COUNTING, second: np.ndarray = ONES) -> None:
    """Asserts that the outputs are sum and difference."""
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), first + second)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), first - second)


def as_text(numbers: np.ndarray) -> np.ndarray:
    """The numbers as BYTES elements of decimal digits."""
    return np.array([str(number).encode() for number in numbers.ravel()], np.object_).reshape(numbers.shape)

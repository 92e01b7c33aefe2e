"""Inputs for stock clients from numpy arrays, and a raw HTTP connection for requests that stock clients never send."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import np_to_triton_dtype

Arrays = Mapping[str, Any]
"""Input arrays by name; an array may stand in a pair (array, datatype)."""


def http_inputs(arrays: Arrays, binary: bool = True) -> list[tritonclient.http.InferInput]:
    """Inputs for `tritonclient.http`."""
    inputs = []
    for name, array, datatype in _described(arrays):
        inputs.append(tritonclient.http.InferInput(name, list(array.shape), datatype))
        inputs[-1].set_data_from_numpy(array, binary_data=binary)
    return inputs


def grpc_inputs(arrays: Arrays) -> list[tritonclient.grpc.InferInput]:
    """Inputs for `tritonclient.grpc`."""
    inputs = []
    for name, array, datatype in _described(arrays):
        inputs.append(tritonclient.grpc.InferInput(name, list(array.shape), datatype))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def _described(arrays: Arrays) -> Iterable[tuple[str, np.ndarray, str]]:
    for name, given in arrays.items():
        array, datatype = given if isinstance(given, tuple) else (given, np_to_triton_dtype(given.dtype))
        yield name, array, datatype


class Answer(NamedTuple):
    """An HTTP response: `headers` by lower-case name."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        """The text of an error's body."""
        return str(json.loads(self.body)["error"])

    @property
    def document(self) -> dict[str, Any]:
        """The JSON body."""
        return dict(json.loads(self.body))


class RawConnection:
    """An HTTP connection on which anything may be sent."""

    def __init__(self, port: int, timeout_s: float = 10.0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout_s)
        self._answers = self.socket.makefile("rb")

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes it."""
        self._answers.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Sends bytes as they are."""
        self.socket.sendall(data)

    def answer(self, has_body: bool = True) -> Answer | None:
        """The next response; None when the server closed the connection instead."""
        try:
            line = self._answers.readline()
        except ConnectionResetError:
            return None
        if not line:
            return None
        status = int(line.split()[1])
        headers: dict[str, str] = {}
        while (line := self._answers.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        if headers.get("transfer-encoding") == "chunked":
            return Answer(status, headers, self._chunked_body())
        length = int(headers.get("content-length", 0)) if has_body else 0
        return Answer(status, headers, self._answers.read(length))

    def _chunked_body(self) -> bytes:
        body = b""
        while size := int(self._answers.readline(), 16):
            body += self._answers.read(size)
            self._answers.readline()
        self._answers.readline()
        return body

    def ask(self, data: bytes) -> Answer | None:
        """Sends a request and reads its response."""
        self.send(data)
        return self.answer()

    def is_closed(self) -> bool:
        """Whether the server has closed the connection; nothing else may be coming."""
        try:
            return self._answers.read(1) == b""
        except ConnectionResetError:
            return True


def post(path: str, body: bytes, *headers: str, length: int | None = None, version: str = "1.1") -> bytes:
    """The bytes of a POST request; `length` is claimed instead of the body's own."""
    lines = [
        f"POST {path} HTTP/{version}",
        "Host: localhost",
        f"Content-Length: {len(body) if length is None else length}",
        *headers,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def infer_body(arrays: Mapping[str, np.ndarray], **more: Any) -> bytes:
    """A KServe JSON body."""
    inputs = [
        {
            "name": name,
            "shape": list(array.shape),
            "datatype": np_to_triton_dtype(array.dtype),
            "data": array.ravel().tolist(),
        }
        for name, array in arrays.items()
    ]
    return json.dumps({"inputs": inputs, **more}).encode()

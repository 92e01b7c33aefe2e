"""The files beside an ONNX model that hold its weights, as the model names them.

Source: `onnx.proto`, of which only the way to the names is read. The file is mapped, so its size does not matter.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from weir.schemas.core.errors import invalid

_GRAPH, _INITIALIZER, _EXTERNAL_DATA, _KEY, _VALUE = 7, 5, 13, 1, 2
"""Numbers of fields: ModelProto.graph, GraphProto.initializer, TensorProto.external_data, and the two of its entries."""

_FIXED_BYTES = {1: 8, 5: 4}
_VARINT, _LENGTH = 0, 2

Span = tuple[int, int]


def external_files(path: Path) -> list[str]:
    """The names of the files, relative to the model's folder, without repetitions; none for one that holds its weights.

    Names in graphs within nodes (loops and branches) are not found. Raises WeirError (INVALID_ARG) for a file that is not
    in protobuf's format, OSError for one that can't be read.
    """
    with path.open("rb") as file:
        if not path.stat().st_size:
            return []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                return list(dict.fromkeys(_locations(content)))
            except (IndexError, ValueError) as error:
                raise invalid(f"'{path.name}' is not an ONNX model: {error}") from None


def _locations(content: mmap.mmap) -> Iterator[str]:
    for graph in _fields(content, (0, len(content)), _GRAPH):
        for tensor in _fields(content, graph, _INITIALIZER):
            for entry in _fields(content, tensor, _EXTERNAL_DATA):
                keys = [content[start:end] for start, end in _fields(content, entry, _KEY)]
                if keys == [b"location"]:
                    yield from (content[start:end].decode() for start, end in _fields(content, entry, _VALUE))


def _fields(content: mmap.mmap, span: Span, wanted: int) -> Iterator[Span]:
    """Where the values of the field `wanted`, which have a length, lie in the message at `span`."""
    position, end = span
    while position < end:
        tag, position = _varint(content, position)
        kind = tag & 7
        if kind == _VARINT:
            _, position = _varint(content, position)
            continue
        if kind == _LENGTH:
            size, position = _varint(content, position)
        elif kind in _FIXED_BYTES:
            size = _FIXED_BYTES[kind]
        else:
            raise ValueError(f"unknown wire type {kind}")
        if position + size > end:
            raise ValueError("a field ends beyond its message")
        if kind == _LENGTH and tag >> 3 == wanted:
            yield position, position + size
        position += size


def _varint(content: mmap.mmap, position: int) -> tuple[int, int]:
    """The number at `position`, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a number has more than 10 bytes")

"""JSON Lines: each line an item, either a KServe request or a plain object of values by input name.

A file is counted by its line ends alone, which is as fast as it can be read; on the way a line is noted about every
MiB, so that a job goes on in the middle without reading what comes before.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from io import FileIO
from typing import Any

from gateway.jobs.files.declared_inputs import DeclaredInput
from gateway.jobs.files.found_files import FoundFile, open_regular, readable, unreadable
from gateway.jobs.files.items import MAX_ITEM_BYTES, JobItem
from gateway.jobs.files.json_values import tensor_of
from schemas.errors import WeirError, invalid
from schemas.json_text import load_json
from schemas.kserve_inputs import read_inputs
from schemas.kserve_request import parse_infer_request
from schemas.regions import no_regions
from schemas.request_limits import RequestLimits
from schemas.requests import InferRequest
from schemas.tensors import Tensor

CHUNK_BYTES = 1 << 20
MAX_NOTED_LINES = 1 << 16
"""Lines of one file whose places are noted; beyond it every other one is forgotten, and the rest is noted as seldom."""

_LIMITS = RequestLimits(input_size=MAX_ITEM_BYTES, json_values=5_000_000)  # read in this process
_NOTHING = memoryview(b"")
_MAX_SHOWN = 100
_BLANK = b" \t\r"
_MAYBE_BLANK = (b"\n\n", b"\n\r", b"\n ", b"\n\t")


class JsonLinesFile:
    """One file of JSON Lines. Lines of nothing but white space are no items."""

    def __init__(self, file: FoundFile, model: str, inputs: dict[str, DeclaredInput]) -> None:
        self._file = file
        self._name = readable(file.name)
        self._lines = _LineParser(model, inputs)
        self._count: int | None = None
        self._items = array("Q", [0])
        self._offsets = array("Q", [0])
        self._line_numbers = array("Q", [0])
        self._stride = 1

    def count(self) -> int:
        """How many items there are. Raises WeirError where the file can't be read."""
        if self._count is None:
            self._count = self._index()
        return self._count

    def items(self, start: int, first_number: int) -> Iterator[JobItem]:
        """The items from the file's item `start` on, the first of which has the job's number `first_number`."""
        place = bisect_right(self._items, start) - 1
        parse, name = self._lines.parse, self._name
        number = first_number - (start - self._items[place])
        for line_number, line in _lines(self._file, self._offsets[place], self._line_numbers[place]):
            if number >= first_number:
                source = f"{name}:{line_number}"
                try:
                    if line is None:
                        raise invalid(f"line is longer than {MAX_ITEM_BYTES} bytes")
                    given, inputs, request = parse(line)
                    yield JobItem(number, given or source, inputs, request)
                except WeirError as error:
                    yield JobItem(number, source, error)
            number += 1

    def _index(self) -> int:
        count = line_number = offset = chunks = 0
        blank_start = True  # nothing of the line that the chunk begins in has been anything but white space
        try:
            with open(open_regular(self._file), "rb", buffering=0) as file:
                while chunk := file.read(CHUNK_BYTES):
                    end = chunk.rfind(b"\n") + 1
                    if end:
                        head = chunk[:end]
                        count += _full_lines(head, blank_start)
                        line_number += head.count(b"\n")
                        blank_start = not chunk[end:].strip(_BLANK)
                        chunks += 1
                        if chunks % self._stride == 0:
                            self._note(count, line_number, offset + end)
                    elif blank_start:
                        blank_start = not chunk.strip(_BLANK)
                    offset += len(chunk)
        except OSError as error:
            raise unreadable(self._file.name, error) from None
        return count + (not blank_start)

    def _note(self, item: int, line_number: int, offset: int) -> None:
        if len(self._items) >= MAX_NOTED_LINES:
            self._stride *= 2
            self._items, self._offsets = self._items[::2], self._offsets[::2]
            self._line_numbers = self._line_numbers[::2]
        self._items.append(item)
        self._line_numbers.append(line_number)
        self._offsets.append(offset)


def _full_lines(text: bytes, blank_start: bool) -> int:
    """How many lines of `text`, which ends with a line, hold something; `blank_start`: the first has nothing before."""
    if text[0] not in b"\n \t\r" and not any(pair in text for pair in _MAYBE_BLANK):
        return text.count(b"\n")
    lines = text.split(b"\n")
    lines.pop()
    full = sum(1 for line in lines if line.strip(_BLANK))
    return full + (not blank_start and not lines[0].strip(_BLANK))


def _lines(file: FoundFile, offset: int, line_number: int) -> Iterator[tuple[int, bytes | None]]:
    """(line number from 1, line) of those that hold something, from the one at `offset`; None for one that is too long.

    Raises WeirError where the file can't be read.
    """
    begun: list[bytes] = []
    size = 0
    with open(open_regular(file), "rb", buffering=0) as source:
        source.seek(offset, os.SEEK_SET)
        while chunk := _read(source, file):
            lines = chunk.split(b"\n")
            begun.append(lines[0])
            size += len(lines[0])
            if size > MAX_ITEM_BYTES:
                begun = [b"?"]  # of a line that is too long nothing is kept but that it is there
            if len(lines) == 1:
                continue
            lines[0] = b"".join(begun)
            last = lines.pop()
            too_long = size > MAX_ITEM_BYTES
            for line in lines:
                line_number += 1
                if too_long:
                    too_long = False
                    yield line_number, None
                elif line.strip(_BLANK):
                    yield line_number, line
            begun, size = [last], len(last)
        line = b"".join(begun)
        if size > MAX_ITEM_BYTES:
            yield line_number + 1, None
        elif line.strip(_BLANK):
            yield line_number + 1, line


def _read(source: FileIO, file: FoundFile) -> bytes:
    try:
        return source.read(CHUNK_BYTES)
    except OSError as error:
        raise unreadable(file.name, error) from None


class _LineParser:
    """What a line of JSON says of the model's inputs."""

    def __init__(self, model: str, inputs: dict[str, DeclaredInput]) -> None:
        self._model = model
        self._inputs = inputs
        self._ambiguous = "inputs" in inputs

    def parse(self, line: bytes) -> tuple[str, list[Tensor], InferRequest | None]:
        """(the item's id if it has one, its inputs, the request where it says more). Raises WeirError."""
        if len(line) > _LIMITS.json_values:
            _check_size(line)
        document = load_json(line)
        if type(document) is not dict:
            raise invalid("line is not a JSON object")
        if "inputs" in document and self._is_request(document):
            return self._read_request(document, line)
        declared = self._inputs
        given = ""
        if "id" in document and "id" not in declared:
            given = document.pop("id")
            if type(given) is not str:
                raise invalid(f"'id' of an item must be a string, got: {str(given)[:_MAX_SHOWN]}")
        try:
            return given, [tensor_of(declared[name], value) for name, value in document.items()], None
        except KeyError:
            unknown = next(name for name in document if name not in declared)
            raise invalid(f"unexpected inference input '{unknown}' for model '{self._model}'") from None

    def _is_request(self, document: dict[str, Any]) -> bool:
        """Whether it is a request, and not an object of values for a model that has an input called `inputs`."""
        inputs = document["inputs"]
        return not self._ambiguous or (type(inputs) is list and bool(inputs) and type(inputs[0]) is dict)

    def _read_request(self, document: dict[str, Any], line: bytes) -> tuple[str, list[Tensor], InferRequest | None]:
        given = document.get("id", "")
        inputs = document["inputs"]
        if len(document) - ("id" in document) > 1 or type(given) is not str or type(inputs) is not list or given == "":
            request = parse_infer_request(self._model, "", line, None, _LIMITS)
            plain = not (request.outputs or request.parameters) and "parameters" not in document
            return request.id, request.inputs, None if plain else request
        request = InferRequest(self._model, "", given)
        read_inputs(request, inputs, _NOTHING, _LIMITS, no_regions)
        return given, request.inputs, None


def _check_size(line: bytes) -> None:
    if line.count(b",") + line.count(b"[") + line.count(b"{") > _LIMITS.json_values:
        raise invalid(f"request JSON holds more than {_LIMITS.json_values} values")

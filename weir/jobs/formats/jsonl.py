"""JSON Lines: each line is an item, either a KServe request or a plain object of values by input name.

`JsonLinesFile` counts a file by its line ends alone, as fast as it can be read, and notes the position of a line about
every MiB, so that a job can continue in the middle without reading what precedes.

Values of plain objects become tensors: numbers, strings and nested lists, without datatypes. Beyond KServe's JSON, FP16 and
BF16 are numbers, which doubles represent exactly, and bytes that are not UTF-8 are `{"base64": "…"}` instead of a string.

`JsonShards`: lines `{"item": n, "source": …, "outputs": {name: value …}}`, with `"error": text` instead of the outputs of a
failed item.
"""

from __future__ import annotations

import base64
import binascii
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from io import FileIO
from itertools import chain
from typing import Any, BinaryIO

import numpy as np
import orjson
import rapidjson

from weir.jobs.formats.input_files import InputFile, open_regular, printable_name, unreadable_file
from weir.jobs.formats.items import MAX_ITEM_BYTES, DeclaredInput, ItemResult, JobItem
from weir.jobs.formats.shards import OutputColumn, ShardFormat, columns_of, text_of
from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.core.request_limits import RequestLimits
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor, as_array, pack_bytes
from weir.schemas.kserve.json_documents import MAX_JSON_DEPTH, load_json, too_deep
from weir.schemas.kserve.json_tensors import pack_json_data
from weir.schemas.kserve.regions import no_regions
from weir.schemas.kserve.request import parse_infer_request, read_inputs

CHUNK_BYTES = 1 << 20
MAX_NOTED_LINES = 1 << 16
"""Noted positions in one file; beyond it every other one is dropped, and later ones are noted half as often."""

_LIMITS = RequestLimits(input_size=MAX_ITEM_BYTES, json_values=5_000_000)  # read in this process
_NOTHING = memoryview(b"")
_MAX_SHOWN = 100
_BLANK = b" \t\r"
_MAYBE_BLANK = (b"\n\n", b"\n\r", b"\n ", b"\n\t")


class JsonLinesFile:
    """One JSON Lines file. Lines of white space alone are skipped."""

    def __init__(self, file: InputFile, model: str, inputs: dict[str, DeclaredInput]) -> None:
        self._file = file
        self._name = printable_name(file.name)
        self._lines = _LineParser(model, inputs)
        self._count: int | None = None
        self._items = array("Q", [0])
        self._offsets = array("Q", [0])
        self._line_numbers = array("Q", [0])
        self._stride = 1

    def count(self) -> int:
        """The number of items. Raises WeirError if the file can't be read."""
        if self._count is None:
            self._count = self._index()
        return self._count

    def items(self, start: int, first_number: int) -> Iterator[JobItem]:
        """The items from index `start` on, which has the number `first_number` in the job."""
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
            raise unreadable_file(self._file.name, error) from None
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
    """The number of lines in `text` that are not blank; `blank_start`: the first line starts in `text`."""
    if text[0] not in b"\n \t\r" and not any(pair in text for pair in _MAYBE_BLANK):
        return text.count(b"\n")
    lines = text.split(b"\n")
    lines.pop()
    full = sum(1 for line in lines if line.strip(_BLANK))
    return full + (not blank_start and not lines[0].strip(_BLANK))


def _lines(file: InputFile, offset: int, line_number: int) -> Iterator[tuple[int, bytes | None]]:
    """(line number from 1, line) of the lines that are not blank, from `offset` on; None for a line that is too long.

    Raises WeirError where the file can't be read.
    """
    started: list[bytes] = []
    size = 0
    with open(open_regular(file), "rb", buffering=0) as source:
        source.seek(offset, os.SEEK_SET)
        while chunk := _read_chunk(source, file):
            lines = chunk.split(b"\n")
            started.append(lines[0])
            size += len(lines[0])
            if size > MAX_ITEM_BYTES:
                started = [b"?"]  # of a line that is too long only its existence is kept
            if len(lines) == 1:
                continue
            lines[0] = b"".join(started)
            last = lines.pop()
            too_long = size > MAX_ITEM_BYTES
            for line in lines:
                line_number += 1
                if too_long:
                    too_long = False
                    yield line_number, None
                elif line.strip(_BLANK):
                    yield line_number, line
            started, size = [last], len(last)
        line = b"".join(started)
        if size > MAX_ITEM_BYTES:
            yield line_number + 1, None
        elif line.strip(_BLANK):
            yield line_number + 1, line


def _read_chunk(source: FileIO, file: InputFile) -> bytes:
    try:
        return source.read(CHUNK_BYTES)
    except OSError as error:
        raise unreadable_file(file.name, error) from None


class _LineParser:
    """Parses lines for one model."""

    def __init__(self, model: str, inputs: dict[str, DeclaredInput]) -> None:
        self._model = model
        self._inputs = inputs
        self._ambiguous = "inputs" in inputs

    def parse(self, line: bytes) -> tuple[str, list[Tensor], InferRequest | None]:
        """(id of the item if it has one, inputs, the request if it has more than inputs). Raises WeirError."""
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
        """Whether it is a request, not an object of values for a model with an input called `inputs`."""
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


BASE64 = "base64"
"""The only member of an object that represents bytes that are not UTF-8."""


def tensor_of(declared: DeclaredInput, value: Any) -> Tensor:
    """The tensor of input `declared` with this value. Raises WeirError."""
    if type(value) is not list:
        return Tensor(declared.name, declared.datatype, declared.scalar, _packed(declared, [value]))
    if value and type(value[0]) is list:
        value, shape = _flattened(declared, value)
        full = declared.shape_of(shape)
    else:
        full = declared.shape_of((len(value),))
    return Tensor(declared.name, declared.datatype, full, _packed(declared, value))


def _packed(declared: DeclaredInput, elements: list[Any]) -> bytes:
    datatype = declared.datatype
    if datatype == "BYTES":
        if dict in set(map(type, elements)):
            return pack_bytes([_bytes_of(declared, element) for element in elements])
    elif datatype == "FP16" or datatype == "BF16":
        wide = np.frombuffer(pack_json_data(declared.name, "FP32", elements, len(elements)), np.float32)
        if datatype == "BF16":
            return to_bf16(wide).tobytes()
        with np.errstate(over="ignore"):
            return wide.astype(np.float16).tobytes()
    return pack_json_data(declared.name, datatype, elements, len(elements))


def _bytes_of(declared: DeclaredInput, element: Any) -> bytes:
    if type(element) is str:
        return element.encode()
    if type(element) is dict and element.keys() == {BASE64} and type(element[BASE64]) is str:
        try:
            return base64.b64decode(element[BASE64], validate=True)
        except binascii.Error:
            pass
    raise invalid(f"value of input '{declared.name}' is neither a string nor bytes as {{\"{BASE64}\": …}}")


def _flattened(declared: DeclaredInput, value: list[Any]) -> tuple[list[Any], list[int]]:
    """(elements, shape) of nested lists."""
    shape = [len(value)]
    while value and type(value[0]) is list:
        size = len(value[0])
        if len(shape) > MAX_JSON_DEPTH:
            raise too_deep()
        if any(type(row) is not list or len(row) != size for row in value):
            raise invalid(f"lists of unequal lengths are not a valid value of input '{declared.name}'")
        shape.append(size)
        value = list(chain.from_iterable(value))
    return value, shape


def to_bf16(wide: np.ndarray) -> np.ndarray:
    """The BF16 bit patterns of float32 values, rounded to nearest, ties to even."""
    bits = wide.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    # Rounding would turn a NaN with its payload in the low half into an infinity.
    return np.where(np.isnan(wide), (bits >> 16).astype(np.uint16) | 0x40, rounded)


def from_bf16(patterns: np.ndarray) -> np.ndarray:
    """BF16 bit patterns as float32, exactly."""
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def json_rows(array: np.ndarray) -> list[Any]:
    """The rows of `array`, in a form that orjson serialises with OPT_SERIALIZE_NUMPY.

    NaN and the infinities are bare literals, as in KServe's JSON. Objects are bytes.
    """
    if array.dtype.kind == "O":
        return [_json_strings(row) for row in array]
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        # In float64 a float32 has other digits, so only rows that need it are converted.
        return [row if np.isfinite(row).all() else _bare_literals(row) for row in array]
    return list(array)


def _bare_literals(row: Any) -> orjson.Fragment:
    return orjson.Fragment(rapidjson.dumps(row.tolist(), number_mode=rapidjson.NM_NAN))


def _json_strings(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_json_strings(element) for element in value]
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {BASE64: base64.b64encode(value).decode()}


_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


class JsonShards(ShardFormat):
    """JSON Lines shards. Values are nested like their shape, without a batch dimension of 1."""

    suffix = ".jsonl"

    def write(self, file: BinaryIO, results: Sequence[ItemResult]) -> int:
        """Implements `ShardFormat`."""
        lines, failures = self._lines(results)
        file.write(b"".join(lines))
        return failures

    def failed(self, file: BinaryIO) -> list[int]:
        """Implements `ShardFormat`."""
        # An output may have this name too, so a line with the text is parsed.
        return [row["item"] for line in file if b'"error":' in line and "error" in (row := _read_line(line))]

    def replace(self, old: BinaryIO, new: BinaryIO, results: Sequence[ItemResult]) -> int:
        """Implements `ShardFormat`."""
        lines, failures = self._lines(results)
        by_number = {result.number: line for result, line in zip(results, lines, strict=True)}
        for line in old:
            row = _read_line(line)
            replaced = by_number.get(row["item"])
            failures += replaced is None and "error" in row
            new.write(line if replaced is None else replaced)
        return failures

    def _lines(self, results: Sequence[ItemResult]) -> tuple[list[bytes], int]:
        errors: list[WeirError | None] = [None] * len(results)
        columns = columns_of(results, self.outputs, errors)
        outputs: list[dict[str, Any]] = [{} for _ in results]
        for column in columns:
            name = column.name
            for place, value in _json_column(column):
                outputs[place][name] = value
        dumps = orjson.dumps
        lines: list[bytes] = []
        for result, values, error in zip(results, outputs, errors, strict=True):
            line: dict[str, Any] = {"item": result.number, "source": result.source}
            if result.kept:
                line["columns"] = {tensor.name: _json_value(tensor) for tensor in result.kept}
            line |= {"outputs": values} if error is None else {"error": text_of(error)}
            lines.append(dumps(line, None, _OPTIONS))
        return lines, len(errors) - errors.count(None)


def _json_value(tensor: Tensor) -> Any:
    """The one element of a tensor, serialisable."""
    assert not isinstance(tensor.data, tuple)  # noqa: S101 - it was read from a file
    return json_rows(as_array(tensor.data, tensor.datatype, (1,)))[0]


def _json_column(column: OutputColumn) -> Iterator[tuple[int, Any]]:
    """(index, serialisable value) of each value of a column."""
    shape = column.shape
    places = [place for place, known in enumerate(column.shapes) if known is not None]
    if shape is not None:
        array = column.stacked(shape)
        yield from zip(places, json_rows(from_bf16(array) if column.datatype == "BF16" else array), strict=True)
        return
    for place in places:
        value = column.value(place)
        if value is not None:
            yield place, json_rows((from_bf16(value) if column.datatype == "BF16" else value)[None])[0]


def _read_line(line: bytes) -> dict[str, Any]:
    """Parses a line of a shard. Raises ValueError."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        row = rapidjson.loads(line, number_mode=rapidjson.NM_NAN)
    if type(row) is not dict or type(row.get("item")) is not int:
        raise ValueError("not a line of a shard")
    return row

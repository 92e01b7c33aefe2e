"""NumPy arrays: each row along the first axis is an item; `.npy` for a model with one input, `.npz` with arrays by
input name.

`NumpyFile` reads rows in blocks and returns views of them. A memory map would be no faster, and a file that is
truncated while it is mapped would end the process.

`NumpyShards` writes `.npz` files without object arrays. `item` (int64), `source` (text) and `failed` (bool) have one
element for each item, `error` (text) one for each failed item. An output whose declared dims are all known is one
array, with a row for each item (zeros for a failed one). An output with unknown dims is two arrays: `NAME` has the
elements of all values one after the other, `NAME.shape` a row for each item, with -1 for an item without a value. BYTES
have a third: `NAME` has their bytes (uint8), `NAME.length` the length of each element (int64); with known dims a failed
item has elements of length 0. BF16 are bit patterns in uint16.
"""

from __future__ import annotations

import os
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import IO, BinaryIO

import numpy as np

from weir.jobs.formats.input_files import InputFile, open_regular, printable_name, unreadable_file
from weir.jobs.formats.items import MAX_ITEM_BYTES, DeclaredInput, ItemResult, JobItem, check_names
from weir.jobs.formats.shards import OutputColumn, ShardFormat, columns_of, text_of
from weir.schemas.config.model_config import ModelOutput
from weir.schemas.core.errors import ErrorCode, WeirError, invalid
from weir.schemas.core.tensors import (
    BY_CONFIG_NAME,
    DATATYPES,
    Tensor,
    element_count,
    name_of_numpy,
    pack_bytes,
    unpack_bytes,
)

BLOCK_BYTES = 4 << 20

_BROKEN_CONTENT = (ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError)
"""Exceptions of reading a damaged archive, besides OSError."""

_BROKEN_HEADER = (*_BROKEN_CONTENT, SyntaxError, tokenize.TokenError, MemoryError, OverflowError, TypeError)
"""The same of a header, which is a literal of Python. MemoryError is what its parser calls literals that nest too deep.
"""


class NumpyFile:
    """One `.npy` or `.npz` file. Reads the headers at once; raises WeirError unless they match the model."""

    def __init__(self, file: InputFile, inputs: dict[str, DeclaredInput]) -> None:
        self._file = file
        self._name = printable_name(file.name)
        self._is_archive = file.name.lower().endswith(".npz")
        try:
            self._arrays = self._read_headers(inputs)
        except OSError as error:
            raise unreadable_file(file.name, error) from None
        except _BROKEN_HEADER as error:
            raise invalid(f"'{self._name}' is not a NumPy array: {error}") from None
        counts = {rows.count for rows in self._arrays}
        if len(counts) > 1:
            raise invalid(f"arrays of '{self._name}' have different numbers of rows: {sorted(counts)}")
        self._count = counts.pop()

    def count(self) -> int:
        """Implements `ItemFile`."""
        return self._count

    def items(self, start: int, first_number: int) -> Iterator[JobItem]:
        """Implements `ItemFile`."""
        try:
            with ExitStack() as opened:
                sources = self._open(opened)
                columns = [rows.tensors(sources(rows.member), start) for rows in self._arrays]
                for index in range(self._count - start):
                    tensors = [next(column) for column in columns]
                    yield JobItem(first_number + index, f"{self._name}[{start + index}]", tensors)
        except OSError as error:
            raise unreadable_file(self._file.name, error) from None
        except _BROKEN_CONTENT as error:
            raise invalid(f"'{self._name}' is broken: {error}") from None

    def _open(self, opened: ExitStack) -> Callable[[str], IO[bytes]]:
        file: IO[bytes] = opened.enter_context(open(open_regular(self._file), "rb"))  # noqa: SIM115 -- it is closed
        if not self._is_archive:
            return lambda _: file
        archive = opened.enter_context(zipfile.ZipFile(file))
        return lambda member: opened.enter_context(archive.open(member))

    def _read_headers(self, inputs: dict[str, DeclaredInput]) -> list[_Rows]:
        with ExitStack() as opened:
            if self._is_archive:
                file = opened.enter_context(open(open_regular(self._file), "rb"))
                archive = opened.enter_context(zipfile.ZipFile(file))
                members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
                names = [info.filename.removesuffix(".npy") for info in members]
                if len(set(names)) != len(names):
                    raise invalid(f"'{self._name}' contains an array twice")
                check_names(names, inputs, f"'{self._name}': array")
                return [
                    self._rows(archive.open(info), info.filename, info.file_size, inputs[name])
                    for info, name in zip(members, names, strict=True)
                ]
            required = [declared for declared in inputs.values() if not declared.optional] or list(inputs.values())
            if len(required) != 1:
                raise invalid(
                    f"'{self._name}' contains one array, but the model has the inputs {sorted(inputs)}: "
                    "give them as a .npz file of arrays with these names"
                )
            file = opened.enter_context(open(open_regular(self._file), "rb"))
            return [self._rows(file, "", os.fstat(file.fileno()).st_size, required[0])]

    def _rows(self, file: IO[bytes], member: str, size: int, declared: DeclaredInput) -> _Rows:
        what = f"'{self._name}'" + (f": array '{declared.name}'" if member else "")
        shape, fortran_order, dtype = _read_header(file)
        if not shape or min(shape) < 0:
            raise invalid(f"{what} has no rows: its shape is {list(shape)}")
        if fortran_order and len(shape) > 1:
            raise invalid(f"{what} is in Fortran order: save it with numpy.ascontiguousarray")
        _check_type(dtype, declared, what)
        row_bytes = element_count(shape[1:]) * dtype.itemsize
        if not 0 < row_bytes <= MAX_ITEM_BYTES:
            raise invalid(f"{what} has rows of {row_bytes} bytes; an item has 1 to {MAX_ITEM_BYTES}")
        start = file.tell()
        if size - start < shape[0] * row_bytes:
            raise invalid(f"{what} is truncated: it has {max(size - start, 0) // row_bytes} of {shape[0]} rows")
        return _Rows(member, declared, declared.row_shape(shape[1:], what), dtype, shape[0], row_bytes, start)


class _Rows:
    """The rows of one array; `start` is the offset of its content in the file or archive `member`."""

    def __init__(  # noqa: PLR0913 - where the array lies in its file
        self,
        member: str,
        declared: DeclaredInput,
        shape: tuple[int, ...],
        dtype: np.dtype,
        count: int,
        row_bytes: int,
        start: int,
    ) -> None:
        self.member = member
        self.count = count
        self._declared = declared
        self._shape = shape
        self._dtype = dtype
        self._row_bytes = row_bytes
        self._start = start

    def tensors(self, file: IO[bytes], first: int) -> Iterator[Tensor]:
        """The rows from `first` on, as views of blocks."""
        name, datatype, shape = self._declared.name, self._declared.datatype, self._shape
        file.seek(self._start + first * self._row_bytes)
        left = self.count - first
        while left:
            rows = min(left, max(1, BLOCK_BYTES // self._row_bytes))
            block = file.read(rows * self._row_bytes)
            if len(block) != rows * self._row_bytes:
                raise invalid(f"array '{name}' was truncated after its items were counted")
            left -= rows
            if datatype == "BYTES":
                elements = np.frombuffer(block, self._dtype).reshape(rows, -1)
                for row in elements:
                    yield Tensor(name, datatype, shape, pack_bytes(row.tolist()))
                continue
            wanted = DATATYPES[datatype].numpy
            view = memoryview(_little_endian(block, self._dtype, wanted))
            size = len(view) // rows
            for begin in range(0, len(view), size):
                yield Tensor(name, datatype, shape, view[begin : begin + size])


def _little_endian(block: bytes, dtype: np.dtype, wanted: np.dtype) -> bytes:
    swapped = dtype.kind != "V" and dtype.byteorder == ">"
    return np.frombuffer(block, dtype).astype(wanted).tobytes() if swapped else block


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """(shape, Fortran order, dtype) of the array at the position of `file`. Raises one of _BROKEN_HEADER."""
    version = np.lib.format.read_magic(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of headers that Python 2 wrote
        if version == (1, 0):
            return np.lib.format.read_array_header_1_0(file)
        if version == (2, 0):
            return np.lib.format.read_array_header_2_0(file)
    raise ValueError(f"version {version[0]}.{version[1]} is not supported")


def _check_type(dtype: np.dtype, declared: DeclaredInput, what: str) -> None:
    wanted = declared.datatype
    if wanted == "BYTES":
        fits = dtype.kind in "SU"
    elif wanted == "BF16":
        fits = dtype.kind in "uV" and dtype.itemsize == 2 and dtype.names is None and dtype.subdtype is None
    else:
        fits = dtype.kind in "biuf" and name_of_numpy(dtype.newbyteorder("=")) == wanted
    if not fits:
        raise invalid(f"{what} holds {dtype}, but input '{declared.name}' is {wanted}")


MAX_ERROR_LENGTH = 1000
"""Characters of an error text; all elements of a text array are as wide as the longest one."""

_EMPTY_STRING = bytes(4)


class NumpyShards(ShardFormat):
    """Shards as `.npz` files."""

    suffix = ".npz"
    own_names = ("item", "source", "failed", "error")

    def __init__(self, outputs: Sequence[ModelOutput]) -> None:
        super().__init__(outputs)
        names = {output.name for output in outputs}
        for name in names:
            if f"{name}.shape" in names or f"{name}.length" in names:
                raise invalid(f"outputs '{name}' and '{name}.…' can't both be written to .npz: write JSON Lines")

    def write(self, file: BinaryIO, results: Sequence[ItemResult]) -> int:
        """Implements `ShardFormat`."""
        errors: list[WeirError | None] = [None] * len(results)
        columns = columns_of(results, self.outputs, errors, exact=True)
        texts = [text_of(error)[:MAX_ERROR_LENGTH] for error in errors if error is not None]
        arrays = {
            "item": np.array([result.number for result in results], np.int64),
            "source": np.array([result.source for result in results], np.str_),
            "failed": np.array([error is not None for error in errors], np.bool_),
            "error": np.array(texts, np.str_),
        }
        for column in columns:
            arrays.update(_arrays_of(column))
        _write_archive(file, arrays)
        return len(texts)

    def failed(self, file: BinaryIO) -> list[int]:
        """Implements `ShardFormat`."""
        with _open_archive(file) as archive:
            numbers: list[int] = _read_array(archive, "item")[_read_array(archive, "failed")].tolist()
        return numbers

    def replace(self, old: BinaryIO, new: BinaryIO, results: Sequence[ItemResult]) -> int:
        """Implements `ShardFormat`."""
        by_number = {result.number: result for result in results}
        return self.write(new, [by_number.get(result.number, result) for result in self.read(old)])

    def read(self, file: BinaryIO) -> list[ItemResult]:
        """The results in a shard, in order. Raises ValueError or OSError for an invalid shard."""
        with _open_archive(file) as archive:
            arrays = {
                name.removesuffix(".npy"): _read_array(archive, name.removesuffix(".npy"))
                for name in archive.namelist()
            }
        try:
            failed = arrays["failed"].tolist()
            errors = iter(arrays["error"].tolist())
            results = [
                ItemResult(number, source, None, WeirError(ErrorCode.UNKNOWN, next(errors)))
                if has_failed
                else ItemResult(number, source, [], None)
                for number, source, has_failed in zip(
                    arrays["item"].tolist(), arrays["source"].tolist(), failed, strict=True
                )
            ]
            for output in self.outputs:
                for result, tensor in zip(results, _tensors_of(arrays, output, len(results)), strict=True):
                    if tensor is not None and result.outputs is not None:
                        result.outputs.append(tensor)
        except (KeyError, StopIteration):
            raise ValueError("an array is missing") from None
        return results


def _known(dims: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if dims is None or -1 in dims else tuple(dims)


def _arrays_of(column: OutputColumn) -> dict[str, np.ndarray]:
    """The arrays of `column`, by name."""
    name, known = column.name, _known(column.dims)
    absent = [place for place, shape in enumerate(column.shapes) if shape is None]
    contents = column.contents
    arrays: dict[str, np.ndarray] = {}
    if known is None:
        rank = len(column.dims or ())
        shapes = [(-1,) * rank if shape is None else shape for shape in column.shapes]
        arrays[f"{name}.shape"] = np.array(shapes, np.int64).reshape(len(shapes), rank)
    elif absent:
        size = DATATYPES[column.datatype].size_bytes
        filler = bytes(element_count(known) * size) if size else _EMPTY_STRING * element_count(known)
        contents = list(contents)
        for place in absent:
            contents[place] = filler
    content = b"".join(contents)
    if column.datatype == "BYTES":
        elements = unpack_bytes(content)
        lengths = np.array([len(element) for element in elements], np.int64)
        arrays[name] = np.frombuffer(b"".join(elements), np.uint8)
        arrays[f"{name}.length"] = lengths if known is None else lengths.reshape(len(contents), *known)
    else:
        flat = np.frombuffer(content, DATATYPES[column.datatype].numpy)
        arrays[name] = flat if known is None else flat.reshape(len(contents), *known)
    return arrays


def _tensors_of(arrays: Mapping[str, np.ndarray], output: ModelOutput, count: int) -> list[Tensor | None]:
    """The values of `output` of `count` items, from the `arrays` of a shard; None for an item without a value.

    Those of items that failed may be fillers. Raises ValueError or KeyError where the arrays do not hold them.
    """
    name, datatype, known = output.name, BY_CONFIG_NAME[output.data_type].name, _known(output.dims)
    shapes = [known] * count if known is not None else [tuple(row) for row in arrays[f"{name}.shape"].tolist()]
    content = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data
    size = DATATYPES[datatype].size_bytes
    lengths = None if size else arrays[f"{name}.length"].reshape(-1)
    ends = None if lengths is None else np.concatenate([[0], np.cumsum(lengths)])
    tensors: list[Tensor | None] = []
    position = 0  # in elements
    for shape in shapes:
        if min(shape, default=0) < 0:
            tensors.append(None)
            continue
        end = position + element_count(shape)
        if lengths is None or ends is None:
            data: bytes | memoryview = content[position * size : end * size]
        else:
            data = b"".join(
                int(length).to_bytes(4, "little") + bytes(content[start : start + length])
                for start, length in zip(ends[position:end], lengths[position:end], strict=True)
            )
        tensors.append(Tensor(name, datatype, shape, data))
        position = end
    return tensors


def _write_archive(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    # numpy.savez takes the arrays' names for its own arguments.
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _open_archive(file: BinaryIO) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise ValueError(str(error)) from None


def _read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    try:
        with archive.open(f"{name}.npy") as member:
            return np.lib.format.read_array(member, allow_pickle=False)
    except (KeyError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(str(error)) from None

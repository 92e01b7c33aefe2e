"""Arrays of numpy: each row along the first axis is an item; `.npy` for a model with one input, `.npz` by input names.

Rows are read in blocks and are views over them. A memory map would be no faster, and a file that is cut off while it is
mapped would end the process.
"""

from __future__ import annotations

import os
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import IO

import numpy as np

from gateway.jobs.files.declared_inputs import DeclaredInput, check_names
from gateway.jobs.files.found_files import FoundFile, open_regular, readable, unreadable
from gateway.jobs.files.items import MAX_ITEM_BYTES, JobItem
from schemas.datatypes import DATATYPES, name_of_numpy
from schemas.errors import invalid
from schemas.tensors import Tensor, element_count, pack_bytes

BLOCK_BYTES = 4 << 20

_BROKEN_CONTENT = (ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError)
"""What reading a broken archive may raise, besides OSError."""

_BROKEN_HEADER = (*_BROKEN_CONTENT, SyntaxError, tokenize.TokenError, MemoryError, OverflowError, TypeError)
"""The same of a header, which is a literal of Python. MemoryError is what its parser calls literals that nest too deep."""


class NumpyFile:
    """One `.npy` or `.npz` file. Its headers are read at once: raises WeirError where they are not as the model wants."""

    def __init__(self, file: FoundFile, inputs: dict[str, DeclaredInput]) -> None:
        self._file = file
        self._name = readable(file.name)
        self._is_archive = file.name.lower().endswith(".npz")
        try:
            self._arrays = self._read_headers(inputs)
        except OSError as error:
            raise unreadable(file.name, error) from None
        except _BROKEN_HEADER as error:
            raise invalid(f"'{self._name}' is no array of numpy: {error}") from None
        counts = {rows.count for rows in self._arrays}
        if len(counts) > 1:
            raise invalid(f"arrays of '{self._name}' have different numbers of rows: {sorted(counts)}")
        self._count = counts.pop()

    def count(self) -> int:
        """See `ItemFile`."""
        return self._count

    def items(self, start: int, first_number: int) -> Iterator[JobItem]:
        """See `ItemFile`."""
        try:
            with ExitStack() as opened:
                sources = self._open(opened)
                columns = [rows.tensors(sources(rows.member), start) for rows in self._arrays]
                for index in range(self._count - start):
                    tensors = [next(column) for column in columns]
                    yield JobItem(first_number + index, f"{self._name}[{start + index}]", tensors)
        except OSError as error:
            raise unreadable(self._file.name, error) from None
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
                    raise invalid(f"'{self._name}' holds an array twice")
                check_names(names, inputs, f"'{self._name}': array")
                return [
                    self._rows(archive.open(info), info.filename, info.file_size, inputs[name])
                    for info, name in zip(members, names, strict=True)
                ]
            required = [declared for declared in inputs.values() if not declared.optional] or list(inputs.values())
            if len(required) != 1:
                raise invalid(
                    f"'{self._name}' holds one array, but the model has the inputs {sorted(inputs)}: "
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
            raise invalid(f"{what} is cut off: it holds {max(size - start, 0) // row_bytes} of {shape[0]} rows")
        return _Rows(member, declared, declared.row_shape(shape[1:], what), dtype, shape[0], row_bytes, start)


class _Rows:
    """One array, row by row: `start` is where its content begins in its file or archive `member`."""

    def __init__(
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
        """The rows from `first` on, each as a view over its block."""
        name, datatype, shape = self._declared.name, self._declared.datatype, self._shape
        file.seek(self._start + first * self._row_bytes)
        left = self.count - first
        while left:
            rows = min(left, max(1, BLOCK_BYTES // self._row_bytes))
            block = file.read(rows * self._row_bytes)
            if len(block) != rows * self._row_bytes:
                raise invalid(f"array '{name}' has been cut off since its items were counted")
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
    """(shape, whether in Fortran order, dtype) of the array that `file` is at. Raises one of _BROKEN_HEADER."""
    version = np.lib.format.read_magic(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of headers that Python 2 wrote
        if version == (1, 0):
            return np.lib.format.read_array_header_1_0(file)
        if version == (2, 0):
            return np.lib.format.read_array_header_2_0(file)
    raise ValueError(f"version {version[0]}.{version[1]} is not known")


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

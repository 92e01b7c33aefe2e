"""Shards of `.npz`: arrays without objects, whose first axis is the shard's items.

`item` (int64), `source` (text), `failed` (bool) have an element for each item, `error` (text) one for each that failed.
An output whose declared dims are all known is one array, with a row for each item (zeros where it failed). One of which
they are not is two: `NAME` holds the elements of all values one after the other, `NAME.shape` has a row for each item,
whose numbers are -1 where it has no value. BYTES have one more: `NAME` holds their bytes (uint8), `NAME.length` the length
of each element (int64); with known dims an item that failed has elements of length 0. BF16 are bit patterns in uint16.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from typing import BinaryIO

import numpy as np

from gateway.jobs.files.items import ItemResult
from gateway.jobs.files.output_columns import OutputColumn, columns_of
from gateway.jobs.files.shard_format import WholeShards, text_of
from schemas.datatypes import BY_CONFIG_NAME, DATATYPES
from schemas.errors import ErrorCode, WeirError, invalid
from schemas.model_config import ModelOutput
from schemas.tensors import Tensor, element_count, unpack_bytes

MAX_ERROR_LENGTH = 1000
"""Characters of an error's text; an array of text is as wide as the longest."""

_EMPTY_STRING = bytes(4)


class NumpyShards(WholeShards):
    """See the module."""

    suffix = ".npz"
    own_names = ("item", "source", "failed", "error")

    def __init__(self, outputs: Sequence[ModelOutput]) -> None:
        super().__init__(outputs)
        names = {output.name for output in outputs}
        for name in names:
            if f"{name}.shape" in names or f"{name}.length" in names:
                raise invalid(f"outputs '{name}' and '{name}.…' can't both be written to .npz: write JSON Lines")

    def write(self, file: BinaryIO, results: Sequence[ItemResult]) -> int:
        """See `ShardFormat`."""
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
        """See `ShardFormat`."""
        with _open_archive(file) as archive:
            numbers: list[int] = _read_array(archive, "item")[_read_array(archive, "failed")].tolist()
        return numbers

    def read(self, file: BinaryIO) -> list[ItemResult]:
        """See `WholeShards`."""
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
    """The arrays that hold `column`, by name."""
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
    """The values of `output` of each of `count` items, in a shard of `arrays`; None where there is none.

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

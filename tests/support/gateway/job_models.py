"""Models and values for the tests of job files; `InProcess` reads Parquet files without a process of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from weir.jobs.formats.input_files import InputFile, open_regular, printable_name
from weir.jobs.formats.items import DeclaredInput, KeptColumn
from weir.jobs.formats.parquet_process import Count
from weir.jobs.formats.parquet_rows import READ_MEMORY_BYTES, ParquetRows, RowEvent
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.tensors import BY_CONFIG_NAME, DATATYPES, Tensor, pack_bytes

ALL = list(DATATYPES)
CONFIG_NAMES = {datatype.name: name for name, datatype in BY_CONFIG_NAME.items()}


def model(max_batch_size: int = 8, outputs: dict[str, Any] | None = None, **inputs: Any) -> ModelConfig:
    """A model whose inputs, and outputs, are given as name = (datatype, dims) or (datatype, dims, optional)."""
    tensors = {
        side: [
            {"name": name, "data_type": CONFIG_NAMES[given[0]], "dims": given[1]}
            | ({"optional": given[2]} if given[2:] else {})
            for name, given in declared.items()
        ]
        for side, declared in (("input", inputs), ("output", outputs or {}))
    }
    return ModelConfig.model_validate({"name": "m", "max_batch_size": max_batch_size, **tensors})


def value(random: np.random.Generator, name: str, datatype: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of any bits; floats that are no NaN, whose bits change on the way through JSON, but may be infinite."""
    count = int(np.prod(shape))
    if datatype == "BYTES":
        return Tensor(
            name, datatype, shape, pack_bytes([random.bytes(int(random.integers(0, 9))) for _ in range(count)])
        )
    size = DATATYPES[datatype].size_bytes
    if datatype == "BOOL":
        return Tensor(name, datatype, shape, random.integers(0, 2, count, np.uint8).tobytes())
    array = np.frombuffer(random.bytes(count * size), DATATYPES[datatype].numpy).copy()
    if datatype == "BF16":
        array[(array & 0x7F80) == 0x7F80] = 0x7F80
    elif array.dtype.kind == "f":
        array[np.isnan(array)] = np.inf
    return Tensor(name, datatype, shape, array.tobytes())


class InProcess:
    """A `RowSource` in this process: an interpreter for each example of a test would take too long."""

    def __init__(self, memory_bytes: int = READ_MEMORY_BYTES) -> None:
        self._memory_bytes = memory_bytes

    def count(self, file: InputFile, inputs: list[DeclaredInput], columns: list[str]) -> Count:
        opened = self._opened(file, inputs, columns)
        return Count(opened.count(), opened.kept)

    def rows(
        self, file: InputFile, inputs: list[DeclaredInput], kept: list[KeptColumn], columns: list[str], start: int
    ) -> Iterator[RowEvent]:
        return self._opened(file, inputs, columns).rows(start)

    def _opened(self, file: InputFile, inputs: list[DeclaredInput], columns: list[str]) -> ParquetRows:
        fd = open_regular(file)
        try:
            by_name = {declared.name: declared for declared in inputs}
            return ParquetRows(fd, printable_name(file.name), by_name, self._memory_bytes, columns)
        finally:
            os.close(fd)

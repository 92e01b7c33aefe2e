"""The files of a job, in whatever format: `open_input` for its items, `JobOutput` for its shards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum

from gateway.jobs.files.declared_inputs import DeclaredInput, declared_inputs
from gateway.jobs.files.file_folder import FileFolder
from gateway.jobs.files.found_files import FoundFile, FoundFiles, find_files, is_folder_of, readable
from gateway.jobs.files.items import MAX_ITEM_BYTES, ItemResult, JobInput, JobItem
from gateway.jobs.files.job_output import JobOutput, OutputFormat
from gateway.jobs.files.joined_input import ItemFile, JoinedInput
from gateway.jobs.files.json_lines import JsonLinesFile
from gateway.jobs.files.numpy_files import NumpyFile
from gateway.jobs.files.parquet_files import ParquetFile
from schemas.errors import invalid
from schemas.model_config import ModelConfig

__all__ = [
    "MAX_ITEM_BYTES",
    "InputFormat",
    "ItemResult",
    "JobInput",
    "JobItem",
    "JobOutput",
    "OutputFormat",
    "default_output_format",
    "open_input",
]


class InputFormat(StrEnum):
    """How the files of an input are read."""

    JSONL = "jsonl"
    NPY = "npy"
    """Arrays of numpy, `.npy` and `.npz`."""
    PARQUET = "parquet"
    FILES = "files"
    """Each file is one item, whatever is in it."""


_BY_SUFFIX = {
    ".jsonl": InputFormat.JSONL,
    ".ndjson": InputFormat.JSONL,
    ".npy": InputFormat.NPY,
    ".npz": InputFormat.NPY,
    ".parquet": InputFormat.PARQUET,
}

_OUTPUT_FORMATS = {InputFormat.NPY: OutputFormat.NPZ, InputFormat.PARQUET: OutputFormat.PARQUET}


def open_input(
    paths: Sequence[str | os.PathLike[str]], format: InputFormat | str | None, config: ModelConfig
) -> JobInput:
    """The items in the files that `paths` (files, folders, patterns) name, for the model of `config`.

    Several files are one input, in sorted order. Format None goes by the files' suffix, which must be one for all;
    a folder whose files are not all of one of these formats is a folder of files. Raises WeirError.
    """
    files = find_files(paths)
    in_folder = is_folder_of(paths)
    chosen = _guessed(files, in_folder) if format is None else input_format(format)
    inputs = declared_inputs(config)
    if chosen is InputFormat.FILES:
        return FileFolder(files, inputs)
    if in_folder:
        files = FoundFiles.only(file for file in files if _BY_SUFFIX.get(_suffix(file)) is chosen)
        if not files:
            raise invalid(f"the job's input holds no files of format '{chosen}'")
    return JoinedInput(files, [_reader(chosen, file, config, inputs) for file in files])


def _reader(format: InputFormat, file: FoundFile, config: ModelConfig, inputs: dict[str, DeclaredInput]) -> ItemFile:
    if format is InputFormat.JSONL:
        return JsonLinesFile(file, config.name, inputs)
    if format is InputFormat.PARQUET:
        return ParquetFile(file, inputs)
    return NumpyFile(file, inputs)


def input_format(name: str) -> InputFormat:
    """The format called `name`. Raises WeirError for one that is not there."""
    try:
        return InputFormat(name)
    except ValueError:
        raise invalid(f"unknown input format '{name}': it is one of {', '.join(InputFormat)}") from None


def default_output_format(paths: Sequence[str | os.PathLike[str]], format: InputFormat | str | None) -> OutputFormat:
    """The output's format where none is asked for: that of the input, JSON Lines for a folder of files."""
    chosen = _guessed(find_files(paths), is_folder_of(paths)) if format is None else input_format(format)
    return _OUTPUT_FORMATS.get(chosen, OutputFormat.JSONL)


def _guessed(files: FoundFiles, in_folder: bool) -> InputFormat:
    found = _BY_SUFFIX.get(_suffix(files[0]))
    other = next((file for file in files if _BY_SUFFIX.get(_suffix(file)) is not found or found is None), None)
    if found is not None and other is None:
        return found
    if in_folder:
        return InputFormat.FILES
    shown = readable((other or files[0]).name)
    raise invalid(f"the format of the job's input does not follow from the suffix of '{shown}': name it")


def _suffix(file: FoundFile) -> str:
    return os.path.splitext(file.name)[1].lower()

"""A folder of files: the bytes of each are one item."""

from __future__ import annotations

import os
from collections.abc import Iterator

from gateway.jobs.files.declared_inputs import DeclaredInput
from gateway.jobs.files.found_files import FoundFile, FoundFiles, open_regular, readable, unreadable
from gateway.jobs.files.items import MAX_ITEM_BYTES, JobInput, JobItem
from schemas.errors import WeirError, invalid
from schemas.tensors import Tensor, pack_bytes


class FileFolder(JobInput):
    """`files` as items for a model with one input: of strings, which has one element, or of bytes as UINT8 [-1].

    Raises WeirError (INVALID_ARG) for any other model.
    """

    def __init__(self, files: FoundFiles, inputs: dict[str, DeclaredInput]) -> None:
        self._files = files
        self._input = _only_input(inputs)

    def count(self) -> int:
        """See `JobInput`."""
        return len(self._files)

    def items(self, start: int = 0) -> Iterator[JobItem]:
        """See `JobInput`."""
        for number in range(start, len(self._files)):
            file = self._files[number]
            try:
                inputs: list[Tensor] | WeirError = [self._tensor(_content(file))]
            except WeirError as error:
                inputs = error
            yield JobItem(number, readable(file.name), inputs)

    def fingerprint(self) -> str:
        """See `JobInput`; of the files' names alone."""
        return self._files.fingerprint()

    def _tensor(self, content: bytes) -> Tensor:
        declared = self._input
        if declared.datatype == "BYTES":
            return Tensor(declared.name, "BYTES", declared.scalar, pack_bytes([content]))
        return Tensor(declared.name, "UINT8", declared.shape_of([len(content)]), content)


def _only_input(inputs: dict[str, DeclaredInput]) -> DeclaredInput:
    candidates = [declared for declared in inputs.values() if not declared.optional] or list(inputs.values())
    if len(candidates) == 1:
        declared = candidates[0]
        if declared.datatype == "BYTES" and set(declared.dims) <= {1, -1}:
            return declared
        if declared.datatype == "UINT8" and declared.dims == (-1,):
            return declared
    raise invalid(
        "a folder of files wants a model with one input, of TYPE_STRING for one element or TYPE_UINT8 of dims [-1]"
    )


def _content(file: FoundFile) -> bytes:
    descriptor = open_regular(file)
    try:
        size = os.fstat(descriptor).st_size
        content = b""
        while size <= MAX_ITEM_BYTES:
            # A byte more than there is: fewer are the end, and one that has grown meanwhile is seen.
            more = os.read(descriptor, size + 1 - len(content))
            if not more:
                return content
            content = content + more if content else more
            size = max(size, len(content))
    except OSError as error:
        raise unreadable(file.name, error) from None
    finally:
        os.close(descriptor)
    raise invalid(f"'{readable(file.name)}' is larger than {MAX_ITEM_BYTES} bytes")

"""What passes between the files of a job and its runner: items in, results out, both numbered from 0 in input order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from schemas.errors import WeirError
from schemas.requests import InferRequest
from schemas.tensors import Tensor

MAX_ITEM_BYTES = 64 << 20
"""Bytes of one item: a line, a row or a file. A larger one is an item in error, and never in memory as a whole."""


class JobItem:
    """One item of a job's input.

    `source` says where it comes from, as its result repeats it: the `id` of a request that has one, else the file and
    the line or row. `inputs` is the error where the item can't be read. `request` is set only where the item is a request
    that says more than its inputs (parameters, outputs): these inputs are its own.
    """

    __slots__ = ("inputs", "number", "request", "source")

    def __init__(
        self, number: int, source: str, inputs: list[Tensor] | WeirError, request: InferRequest | None = None
    ) -> None:
        self.number = number
        self.source = source
        self.inputs = inputs
        self.request = request

    def __repr__(self) -> str:
        return f"JobItem({self.number}, {self.source!r}, {self.inputs!r})"


class ItemResult:
    """What became of one item: its outputs, or the error it ended with; exactly one of them is not None."""

    __slots__ = ("error", "number", "outputs", "source")

    def __init__(self, number: int, source: str, outputs: list[Tensor] | None, error: WeirError | None) -> None:
        self.number = number
        self.source = source
        self.outputs = outputs
        self.error = error

    def __repr__(self) -> str:
        return f"ItemResult({self.number}, {self.source!r}, {self.error or self.outputs!r})"


class JobInput(ABC):
    """The items of a job, in an order that stays the same as long as its files do. Blocking: for threads only.

    One object serves one reader at a time.
    """

    @abstractmethod
    def count(self) -> int | None:
        """How many items there are; None where that can't be known. Slow the first time, for text is read for it.

        Raises WeirError where a file can't be read.
        """

    @abstractmethod
    def items(self, start: int = 0) -> Iterator[JobItem]:
        """The items from number `start` on. What comes before is passed over without being read, as far as can be.

        What is wrong with single items, or with the rest of a file, are items in error: nothing is raised.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """A text that is another one when the files are others: a job whose input changed must not go on in the middle."""

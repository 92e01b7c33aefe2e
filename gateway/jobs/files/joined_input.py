"""Several files as one input: their items one after the other, and always as many as were counted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol

from gateway.jobs.files.found_files import FoundFile, fingerprint_of, readable
from gateway.jobs.files.items import JobInput, JobItem
from schemas.errors import WeirError, invalid


class ItemFile(Protocol):
    """One file of items."""

    def count(self) -> int:
        """How many items it has. Raises WeirError where it can't be read."""
        ...

    def items(self, start: int, first_number: int) -> Iterator[JobItem]:
        """Those from its item `start` on, which has the job's number `first_number`.

        A WeirError ends them: it becomes the error of each item that is left.
        """
        ...


class JoinedInput(JobInput):
    """The items of `files`, each of which is read by the one of `readers` at its place."""

    def __init__(self, files: Sequence[FoundFile], readers: Sequence[ItemFile]) -> None:
        self._files = files
        self._readers = readers
        self._firsts: list[int] | None = None

    def count(self) -> int:
        """See `JobInput`."""
        return self._counted()[-1]

    def items(self, start: int = 0) -> Iterator[JobItem]:
        """See `JobInput`."""
        firsts = self._counted()
        for index in range(max(bisect_right(firsts, start) - 1, 0), len(self._files)):
            first, end = firsts[index], firsts[index + 1]
            number = max(start, first)
            if number < end:
                yield from self._of_file(index, number - first, number, end)

    def fingerprint(self) -> str:
        """See `JobInput`."""
        return fingerprint_of(self._files)

    def _of_file(self, index: int, start: int, number: int, end: int) -> Iterator[JobItem]:
        """A file that is shorter than it was when it was counted has items in error, and one that is longer no more."""
        name = readable(self._files[index].name)
        error = invalid(f"'{name}' has changed since its items were counted")
        try:
            for item in self._readers[index].items(start, number):
                yield item
                number += 1
                if number == end:
                    return
        except WeirError as problem:
            error = problem
        for missing in range(number, end):
            yield JobItem(missing, name, error)

    def _counted(self) -> list[int]:
        if self._firsts is None:
            self._firsts = [0, *accumulate(reader.count() for reader in self._readers)]
        return self._firsts

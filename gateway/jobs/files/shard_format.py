"""`ShardFormat`: what a format of output has to do; one file for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import BinaryIO, ClassVar

from gateway.jobs.files.items import ItemResult
from schemas.errors import WeirError, invalid
from schemas.model_config import ModelOutput


class ShardFormat(ABC):
    """How shards are written and read again. `outputs` are those that the model declares."""

    suffix: ClassVar[str]

    def __init__(self, outputs: Sequence[ModelOutput]) -> None:
        self.outputs = outputs

    @abstractmethod
    def write(self, file: BinaryIO, results: Sequence[ItemResult]) -> int:
        """Write `results`, all of a shard, and return how many of them are failures."""

    @abstractmethod
    def failed(self, file: BinaryIO) -> list[int]:
        """The numbers of the items that failed, in a shard. Raises ValueError or OSError for what is none."""

    @abstractmethod
    def replace(self, old: BinaryIO, new: BinaryIO, results: Sequence[ItemResult]) -> int:
        """Write the shard `old` again into `new`, with `results` in place of what it had of these items.

        Returns how many failures are left. Raises ValueError or OSError for what is no shard.
        """


class WholeShards(ShardFormat):
    """A format whose shards are written from all their results at once, and so are read as a whole to be changed.

    `own_names` are those that outputs can't have. Raises WeirError (INVALID_ARG) where one has.
    """

    own_names: ClassVar[tuple[str, ...]]

    def __init__(self, outputs: Sequence[ModelOutput]) -> None:
        super().__init__(outputs)
        for output in outputs:
            if output.name in self.own_names:
                raise invalid(f"an output called '{output.name}' can't be written to {self.suffix}: write JSON Lines")

    @abstractmethod
    def read(self, file: BinaryIO) -> list[ItemResult]:
        """The results in a shard, in order. Raises ValueError or OSError for what is none."""

    def replace(self, old: BinaryIO, new: BinaryIO, results: Sequence[ItemResult]) -> int:
        """See `ShardFormat`."""
        by_number = {result.number: result for result in results}
        return self.write(new, [by_number.get(result.number, result) for result in self.read(old)])


def text_of(error: WeirError) -> str:
    """The text of `error` as it can be written: what comes from a model need not be valid Unicode."""
    return error.message.encode(errors="replace").decode()

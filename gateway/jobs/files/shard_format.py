"""`ShardFormat`: what a format of output has to do; one file for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import BinaryIO, ClassVar

from gateway.jobs.files.items import ItemResult
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

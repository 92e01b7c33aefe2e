"""`QueueEpochs`: from which epoch on each queue is owned, so that no batch is taken of one that had it before.

A scheduler that was stopped for a while may send, when it goes on, what another has run meanwhile, or runs just now.
"""

from __future__ import annotations

import logging

from bus import subjects
from bus.connection import Bus, Message
from schemas.messages import BatchMessage
from schemas.ownership import unpack_queue_owner
from schemas.wire import MalformedMessage

logger = logging.getLogger("weir.worker")

MAX_QUEUES = 65_536
"""Queues whose owners are remembered; their names come from messages alone."""


class QueueEpochs:
    """See the module. `refused` counts batches that were not taken."""

    def __init__(self) -> None:
        self._owners: dict[tuple[str, int], tuple[int, str]] = {}
        self.refused = 0
        self.malformed_messages = 0

    async def start(self, bus: Bus) -> None:
        """Hears of queues that are taken, before anything comes from their new owners."""
        await bus.subscribe(subjects.OWNER_WORD, self._on_word)

    def later_than(self, batch: BatchMessage) -> int:
        """The epoch of a later owner than the batch's, or of another one in the same; 0 where there is none."""
        if not batch.epoch:
            return 0
        epoch, owner = self._owners.get((batch.model, batch.partition), (0, ""))
        if epoch < batch.epoch:
            self._note(batch.model, batch.partition, batch.epoch, batch.scheduler)
        elif epoch > batch.epoch or owner != batch.scheduler:
            self.refused += 1
            logger.warning(
                "model %s: a batch of %s was refused: another scheduler owns its queue from epoch %d on",
                batch.model,
                batch.scheduler,
                epoch,
            )
            return epoch
        return 0

    def _on_word(self, message: Message) -> None:
        try:
            model, partition, owner, epoch = unpack_queue_owner(message.data)
        except MalformedMessage as error:
            self.malformed_messages += 1
            logger.warning("subject %s: %s", message.subject, error)
            return
        if owner and epoch > self._owners.get((model, partition), (0, ""))[0]:
            self._note(model, partition, epoch, owner)

    def _note(self, model: str, partition: int, epoch: int, owner: str) -> None:
        if len(self._owners) >= MAX_QUEUES and (model, partition) not in self._owners:
            del self._owners[next(iter(self._owners))]
        self._owners[model, partition] = epoch, owner

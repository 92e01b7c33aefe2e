"""`QueueOwners`: the records of which scheduler owns which queue of live requests, one for each queue.

A record is written by compare-and-set on the sequence of the one before, so of several that take a queue at once one has
it. The bucket lies in memory: nobody owns anything when the broker has come back without it, and who did before writes it
again. So the sequences of its stream can't number the owners of a queue, for they begin anew; a record has an *epoch*,
which is unix milliseconds of when it was written, or one more than the highest that the writer knows of where that is
higher (as clocks differ). Compare-and-set sees to it that nobody has the same twice, and time that they grow after a
restart too, where all who knew the last one have gone. (Should clocks make them equal all the same, who is first counts:
workers look at the owner, too.)
Source: JetStream's `Nats-Expected-Last-Subject-Sequence`, and STREAM.MSG.GET, which the stream's leader answers: a direct
get may be answered by a replica that is behind.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Callable
from typing import NamedTuple

from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, NoStreamResponseError

from bus import subjects
from bus.connection import Bus
from bus.live_queues import LiveQueue
from bus.streams import ensure_stream
from schemas.ownership import MAX_EPOCH, QueueOwner, pack_queue_owner, unpack_queue_owner
from schemas.wire import MalformedMessage

MAX_RECORDS_BYTES = 64 << 20
_PATIENCE_S = 2.0
_NO_MESSAGE = 10037
_WRONG_LAST_SEQUENCE = (10071, 10164)
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"


class OwnerRecord(NamedTuple):
    """Whose a queue is ("": nobody's), from which epoch on, and the sequence of this record (0: there is none)."""

    owner: str = ""
    epoch: int = 0
    sequence: int = 0


class QueueOwners:
    """See the module. All raise NatsError, OSError or TimeoutError while the broker is away."""

    def __init__(self, bus: Bus, unix_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._bus = bus
        self._unix_ms = unix_ms

    async def ensure(self) -> None:
        """Makes the bucket unless it is there."""
        await ensure_stream(
            self._bus,
            StreamConfig(
                name=subjects.OWNERS_STREAM,
                subjects=[subjects.OWNER_RECORDS],
                storage=StorageType.MEMORY,
                retention=RetentionPolicy.LIMITS,
                discard=DiscardPolicy.NEW,
                max_msgs_per_subject=1,
                max_bytes=MAX_RECORDS_BYTES,
                allow_rollup_hdrs=True,
                num_replicas=self._bus.replicas,
            ),
        )

    async def read(self, queue: LiveQueue) -> OwnerRecord:
        """The record of a queue as it stands."""
        question = {"last_by_subj": subjects.owner_record(*queue)}
        answer = await self._bus.ask(f"$JS.API.STREAM.MSG.GET.{subjects.OWNERS_STREAM}", question)
        if "error" in answer:
            if answer["error"].get("err_code") == _NO_MESSAGE:
                return OwnerRecord()
            APIError.from_error(answer["error"])
        sequence = int(answer["message"]["seq"])
        try:
            told = unpack_queue_owner(base64.b64decode(answer["message"].get("data", ""), validate=True))
        except (MalformedMessage, binascii.Error):
            return OwnerRecord(sequence=sequence)  # nobody vouches for it: it is written over
        return OwnerRecord(told.owner, told.epoch, sequence)

    async def write(self, queue: LiveQueue, owner: str, after: OwnerRecord, highest: int = 0) -> OwnerRecord | None:
        """Makes the queue `owner`'s where `after` is still its record; None where it is not.

        `highest` is the highest epoch of it that the caller knows of.
        """
        epoch = min(max(self._unix_ms(), after.epoch + 1, highest + 1), MAX_EPOCH - 1)
        record = pack_queue_owner(QueueOwner(*queue, owner, epoch))
        try:
            ack = await self._bus.jetstream.publish(
                subjects.owner_record(*queue), record, timeout=_PATIENCE_S, headers={_EXPECTED: str(after.sequence)}
            )
        except NoStreamResponseError:
            await self.ensure()
            return None
        except APIError as error:
            if error.err_code in _WRONG_LAST_SEQUENCE:
                return None
            raise
        return OwnerRecord(owner, epoch, ack.seq)

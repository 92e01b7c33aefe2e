"""`TrafficRecords`: what operators have set for the traffic of models (bucket `traffic`, on disk), by the model's identity.

Gateways and ramps write the records, and all callers of models follow the bucket.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec.structs import replace
from nats.js.api import StorageType

from weir.bus.kv.typed_bucket import TypedBucket, without_broker_errors
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus
from weir.bus.streams.declarations import Bucket
from weir.schemas.wire.traffic import TrafficRecord

_BUCKET = Bucket(subjects.TRAFFIC_BUCKET, StorageType.FILE)


class TrafficRecords(TypedBucket[TrafficRecord]):
    """The records of models for which something was set."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus, _BUCKET, TrafficRecord.pack, _unpack, lambda record: record.model)

    async def change(
        self, model: str, by: str, change: Callable[[TrafficRecord | None], TrafficRecord | None]
    ) -> tuple[TrafficRecord | None, TrafficRecord | None]:
        """As `update`, for `by`. Returns the record before, and the one after, which is the same if nothing has changed.

        Sets its revision and who has changed it when. Raises WeirError (UNAVAILABLE) without a broker.
        """
        before: TrafficRecord | None = None

        def dated(known: TrafficRecord | None) -> TrafficRecord | None:
            nonlocal before
            before, after = known, change(known)
            if after is None or after is known:
                return after
            now_ns = time.time_ns()
            revision = max(now_ns, 1 + (0 if known is None else known.revision))
            return replace(after, revision=revision, changed_ms=now_ns // 1_000_000, by=by)

        with without_broker_errors(f"the traffic record of model '{model}'"):
            after = await self.update(model, dated)
        return before, after


def _unpack(data: bytes) -> TrafficRecord:
    record = TrafficRecord.unpack(data)
    _ = record.rule  # raises ValueError for an invalid one
    return record

"""How workers and schedulers coordinate a change of a model: `DrainCoordinator` and `RollingReload`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping

from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus, Message
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.model_control import DrainMessage
from weir.schemas.wire.registry import ModelRecord, ModelState
from weir.worker.backend_api.inference_client import InferenceClient

logger = logging.getLogger("weir.worker")

SETTLE_S = 0.1
"""How long requests may be on their way to the scheduler after the version was published as retiring."""

_ASK_INTERVAL_S = 0.1
DRAIN_TIMEOUT_S = 30.0
"""After how long without a reply from a partition's scheduler a version is unloaded without its permission."""


class DrainCoordinator:
    """Asks the schedulers of a model whether versions may be unloaded: they agree when no request for them is left.

    Each partition of a model may have another scheduler, and all of them must agree. `malformed_messages` counts replies
    that could not be decoded.
    """

    def __init__(self, bus: Bus, worker_id: str) -> None:
        self._bus = bus
        self._worker = worker_id
        self._needed: dict[str, dict[int, set[int]]] = {}  # versions by model and partition
        self._replied: set[tuple[str, int]] = set()
        self.malformed_messages = 0

    async def start(self) -> None:
        """Subscribes to replies."""
        await self._bus.subscribe(subjects.drained(self._worker), self._on_reply)

    async def wait(self, model: str, versions: set[int], partitions: int = 1) -> None:
        """Returns when the schedulers of all partitions agree that these versions of the model may be unloaded.

        A scheduler that has not replied for `DRAIN_TIMEOUT_S` is taken to agree.
        """
        await asyncio.sleep(SETTLE_S)
        needed = self._needed[model] = {partition: set(versions) for partition in range(partitions)}
        try:
            await self._ask(model, needed)
        finally:
            if self._needed.get(model) is needed:
                del self._needed[model]

    async def _ask(self, model: str, needed: dict[int, set[int]]) -> None:
        last_reply_s = dict.fromkeys(needed, time.monotonic())
        while versions := set[int]().union(*needed.values()):
            self._replied.difference_update((model, partition) for partition in last_reply_s)
            request = DrainMessage.of(self._worker, model, versions).pack()
            self._bus.publish(subjects.drain(model), request, subjects.drained(self._worker))
            await asyncio.sleep(_ASK_INTERVAL_S)
            now_s = time.monotonic()
            for partition in last_reply_s:
                if (model, partition) in self._replied or not self._bus.is_connected:
                    last_reply_s[partition] = now_s
                elif needed[partition] and now_s - last_reply_s[partition] > DRAIN_TIMEOUT_S:
                    logger.warning(
                        "no scheduler has replied for %.0f s: '%s' is unloaded although requests for it may be queued",
                        DRAIN_TIMEOUT_S,
                        model,
                    )
                    needed[partition].clear()

    def _on_reply(self, message: Message) -> None:
        if message.status:
            return  # no scheduler has subscribed: it is being restarted
        try:
            reply = DrainMessage.unpack(message.data)
        except MalformedMessage as error:
            self.malformed_messages += 1
            logger.warning("dropped a malformed drain reply: %s", error)
            return
        needed = self._needed.get(reply.model, {}).get(reply.partition)
        if needed is not None:
            needed.difference_update(reply.versions)
            self._replied.add((reply.model, reply.partition))


class RollingReload:
    """Has the workers that serve a model reload it one after another, so that a bad version stops at the first worker.

    The order follows from the registry alone: a worker waits for the workers with smaller names that serve the model, until
    each of them has carried the operation out or has left. There is no lock, so a worker that dies delays no other. A model
    that serves nowhere is loaded by all workers at once.
    """

    def __init__(self, client: InferenceClient, worker_id: str) -> None:
        self._client = client
        self._worker_id = worker_id
        self._changed = asyncio.Event()
        self._is_watching = False

    async def turn(self, name: str, revision: int, holders: Collection[str] | None) -> WeirError | None:
        """Returns None when this worker may carry out operation `revision`, or the error of a worker before it.

        `holders` are the workers that should serve the model; None stands for all that do. While the broker is away, no
        worker waits for another.
        """
        if not self._is_watching:
            self._is_watching = True
            self._client.registry.on_model_change(lambda _name: self._changed.set())
            self._client.registry.on_worker_lost(lambda _worker: self._changed.set())
        try:
            await self._client.open()
        except WeirError:
            return None
        while True:
            preceding = preceding_records(self._worker_id, self._records(name, holders))
            failure = first_failure(preceding, revision)
            if failure is not None or all(record.revision >= revision for record in preceding):
                return failure
            self._changed.clear()
            await self._changed.wait()

    def _records(self, name: str, holders: Collection[str] | None) -> dict[str, ModelRecord]:
        return {
            worker: view.models[name]
            for worker, view in self._client.registry.workers.items()
            if name in view.models
            and not (view.record.draining or view.record.leaving)
            and (holders is None or worker in holders)
        }


def preceding_records(worker_id: str, records: Mapping[str, ModelRecord]) -> list[ModelRecord]:
    """The records of the workers that reload the model before `worker_id`, in their order."""
    return [
        records[worker]
        for worker in sorted(records)
        if worker < worker_id and any(row.state == ModelState.READY for row in records[worker].versions.values())
    ]


def first_failure(records: list[ModelRecord], revision: int) -> WeirError | None:
    """The error of the first worker that failed to carry out `revision`; a worker without the model has not failed."""
    for record in records:
        is_absent = record.elsewhere or record.error_code == ErrorCode.INTERNAL.number
        if record.revision >= revision and record.error_code and not is_absent:
            return WeirError(ErrorCode.from_number(record.error_code), record.error)
    return None

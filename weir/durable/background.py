"""`BackgroundWork`: what a process does for durable requests and jobs besides answering clients.

It runs the durable consumer, the jobs and ramps whose leases the process holds, and the posts to callback URLs. A gateway
runs it itself, or leaves it to `weir durable`, so that none of it delays HTTP and gRPC.
"""

from __future__ import annotations

import asyncio

from weir.durable.api.callback_rules import CallbackRules
from weir.durable.api.callbacks import Callbacks
from weir.durable.api.store import DurableStore
from weir.durable.consumer.consumer import DurableConsumer
from weir.durable.consumer.context import ConsumerServices
from weir.durable.ramps import RampHost
from weir.durable.settings import QueueSettings
from weir.jobs.records.folders import BatchRoots
from weir.jobs.records.store import JobStore
from weir.jobs.run.host import JobHost
from weir.jobs.run.run import RunContext

__all__ = ["BackgroundWork", "ConsumerServices"]


class BackgroundWork:
    """Starts and stops the consumer, the job host, the ramps and the callbacks of process `process_id`."""

    def __init__(  # noqa: PLR0913 - the kinds of work
        self,
        store: DurableStore,
        jobs: JobStore,
        services: ConsumerServices,
        process_id: str,
        settings: QueueSettings,
        ramps: RampHost | None,
    ) -> None:
        self._ramps = ramps
        self.consumer = DurableConsumer(store, services, process_id, settings)
        self.callbacks = Callbacks(store.bus, store.messages, CallbackRules(settings.callback_allow))
        context = RunContext(
            owner_id=process_id,
            inference=services.inference,
            catalog=services.catalog,
            roots=BatchRoots(settings.batch_roots),
            attempts=settings.durable_attempts,
        )
        self._jobs = JobHost(jobs, store.leases, context)
        self._inference = services.inference

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Starts everything. The streams must exist; raises NatsError, OSError or TimeoutError if the broker goes away."""
        await self.callbacks.start(background)
        self._jobs.start(background)
        if self._ramps is not None:
            self._ramps.start(background)
        await self.consumer.start(background)
        await self._inference.on_lost_attempts(self.consumer.lost)

    async def stop(self, timeout_s: float) -> None:
        """Starts nothing more; returns when what is under way is recorded, or after `timeout_s`."""
        if self._ramps is not None:
            self._ramps.stop()
        self.callbacks.stop()
        await asyncio.gather(self._jobs.stop(), self.consumer.stop(timeout_s))

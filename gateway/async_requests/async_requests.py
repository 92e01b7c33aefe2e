"""`AsyncRequests`: all that a gateway has for requests that are answered later, whichever door they come by."""

from __future__ import annotations

import asyncio

from gateway.async_requests.acceptance import Acceptance
from gateway.async_requests.callback_rules import CallbackRules
from gateway.async_requests.callbacks import Callbacks
from gateway.async_requests.job_ids import JobIds
from gateway.async_requests.queue_depths import QueueDepths
from gateway.async_requests.request_jobs import RequestJobs
from gateway.durable.store import DurableStore
from gateway.settings import GatewaySettings
from schemas.queue_bounds import QueueBounds


class AsyncRequests:
    """See the module. `durable` is what stores them."""

    def __init__(self, durable: DurableStore, settings: GatewaySettings) -> None:
        depths = QueueDepths(durable.bus)
        self.bus = durable.bus
        self.secret = durable.secret
        self.rules = CallbackRules(settings.callback_allow)
        bounds = QueueBounds(settings.queue_max_messages, settings.queue_max_bytes, settings.queue_max_age_secs)
        ids = JobIds(lambda: durable.secret.value)
        self.acceptance = Acceptance(durable, durable.messages, depths, bounds, ids)
        self.jobs = RequestJobs(durable.bus, durable.publisher, durable.messages, depths, ids)
        self.callbacks = Callbacks(durable.bus, durable.messages, self.rules)

    async def start(self, background: asyncio.TaskGroup) -> None:
        """Ready to accept; posts answers to callback URLs from now on, where any are allowed."""
        await self.callbacks.start(background)

    def stop(self) -> None:
        """Has nobody wait any longer, and posts nothing more: another gateway does, or this one when it is back."""
        self.jobs.stop()
        self.callbacks.stop()

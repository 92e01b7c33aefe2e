"""`AsyncRequests`: acceptance and lookup of asynchronous requests, for every frontend of a gateway."""

from __future__ import annotations

from weir.durable.api.acceptance import Acceptance, AsyncRequestIds, QueueDepths
from weir.durable.api.callback_rules import CallbackRules
from weir.durable.api.lookup import AsyncRequestLookup
from weir.durable.api.store import DurableStore
from weir.durable.settings import QueueSettings


class AsyncRequests:
    """What a gateway offers for requests whose responses are fetched later. `durable` stores them."""

    def __init__(self, durable: DurableStore, settings: QueueSettings) -> None:
        depths = QueueDepths(durable.bus)
        self.bus = durable.bus
        self.secret = durable.secret
        self.rules = CallbackRules(settings.callback_allow)
        ids = AsyncRequestIds(lambda: durable.secret.value)
        self.acceptance = Acceptance(durable, durable.messages, depths, settings.queue_bounds, ids)
        self.jobs = AsyncRequestLookup(durable.bus, durable.publisher, durable.messages, depths, ids)

    def stop(self) -> None:
        """Ends the waits of clients: they get the state of their request as it is."""
        self.jobs.stop()

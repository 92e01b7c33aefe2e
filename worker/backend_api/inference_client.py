"""`InferenceClient`: sends requests of a worker itself, for the steps of ensembles and for Python models that call others.

Requests go through the bus as those of a gateway do, under the worker's id. They therefore pass the called model's own
queue, limits and statistics, and run wherever that model is served. Large outputs stay in the memory of the worker that
made them: a response contains a `PayloadRef`, which may be passed on as the input of another request, or in a response.
Each reference that is not passed on is released once, by `release`.

A worker that sends no requests pays nothing for this: only the first call of `open` subscribes to the registry and to
responses. If the broker is not available then, the client retries, and rejects requests until it is open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from nats.errors import Error as NatsError

from weir.bus.kv.known_models import KnownModels
from weir.bus.kv.registry import RegistryView
from weir.bus.nats.connection import Bus
from weir.bus.payloads.arena import PayloadArena
from weir.bus.payloads.fetcher import PayloadFetcher
from weir.calls.cache.config import CacheConfig
from weir.calls.cache.response_cache import ResponseCache
from weir.calls.catalog import Catalog, ServedModel
from weir.calls.dispatch import DispatchOptions, RequestDispatcher
from weir.calls.in_flight import DirectExecutor, OnResponse, PendingRequest
from weir.calls.payload_store import PayloadStore
from weir.calls.readiness import Readiness
from weir.calls.request_templates import RequestTemplate
from weir.calls.tracing import PassedTraces
from weir.runtime.containment import call_each
from weir.runtime.ticks import next_tick
from weir.schemas.core.errors import Reason, WeirError, overloaded
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import PayloadRef

logger = logging.getLogger("weir.worker")

OPEN_TIMEOUT_S = 10.0
"""How long `open` waits for a broker that is not available."""

_EXPIRY_INTERVAL_S = 1.0
_RETRY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """What an `InferenceClient` does beyond sending requests.

    `cache` is the response cache for its requests; with `summary_latencies` the cache's counters include latency sketches.
    `fetcher` fetches payloads from other hosts. `direct` runs requests on instances of this worker.
    """

    cache: CacheConfig | None = None
    summary_latencies: bool = False
    fetcher: PayloadFetcher | None = None
    direct: DirectExecutor | None = None


class InferenceClient:
    """Sends requests to models. Everything runs in the worker's event loop; its tasks run in `background`."""

    def __init__(
        self, bus: Bus, worker_id: str, background: asyncio.TaskGroup, options: ClientOptions | None = None
    ) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._background = background
        self._opening: asyncio.Task[None] | None = None
        self._expiry: asyncio.Task[None] | None = None
        self._payloads: PayloadStore | None = None
        self._inference: RequestDispatcher | None = None
        self._options = options or ClientOptions()
        self._cache: ResponseCache | None = None
        self._is_open = False
        self._is_closed = False
        self._on_tick: list[Callable[[], None]] = []
        self.registry = RegistryView(bus)
        self.catalog = Catalog(self.registry, strict_readiness=False)
        self._known = KnownModels(bus)
        self.catalog.accept_known(self._known)
        self.readiness = Readiness(bus, worker_id, self.catalog)

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self._is_open

    def open_soon(self) -> None:
        """Starts to open, without waiting for it."""
        if self._opening is None and not self._is_closed:
            self._opening = self._background.create_task(self._open())

    async def open(self) -> None:
        """Returns when requests can be sent. Only the first call does any work.

        Raises WeirError (UNAVAILABLE) if the broker is not available within `OPEN_TIMEOUT_S`; the client goes on trying.
        """
        if self._is_open:
            return
        self.open_soon()
        if self._opening is not None:
            await asyncio.wait({self._opening}, timeout=OPEN_TIMEOUT_S)
        if not self._is_open:
            raise _unreachable()

    def each_second(self, listener: Callable[[], None]) -> None:
        """Calls `listener()` about once a second, after workers without heartbeats have expired."""
        self._on_tick.append(listener)

    def submit(self, request: InferRequest, on_response: OnResponse) -> PendingRequest:
        """Sends a request; `on_response(response or error or None, is_final)` is called later, from the event loop.

        With `request.wants_timestamps`, the returned object's `timestamps` are those of the response during that call.
        `on_response` owns the references in the response. Raises WeirError for requests that a gateway would reject at
        once, and for all requests before `open` has returned.
        """
        return self._dispatcher.submit(request, on_response)

    def submit_template(
        self, model: ServedModel, template: RequestTemplate, body: bytes, on_response: OnResponse, deadline_ms: int = 0
    ) -> PendingRequest:
        """As `submit`, for a request of a template: `body` is packed, and small enough for a message."""
        return self._dispatcher.submit_packed(model, template.request, body, on_response, deadline_ms)

    def caches(self, model: ServedModel) -> bool:
        """Whether responses of the model may come from a cache, so that its requests cannot use templates."""
        return self._dispatcher.caches(model)

    def cancel(self, pending: PendingRequest) -> None:
        """Cancels a request: `on_response` is not called any more, and the references in late responses are released."""
        self._dispatcher.cancel(pending)

    def cancel_and_listen(self, pending: PendingRequest) -> None:
        """Cancels a request whose caller wants to know how it ends: `on_response` is called as if it went on."""
        self._dispatcher.cancel_and_listen(pending)

    def release(self, ref: PayloadRef) -> None:
        """Releases an output to the worker in whose memory it lies."""
        self._dispatcher.release(ref)

    def cache_counters(self) -> list[dict[str, Any]]:
        """Cache hits and misses, as dictionaries of `weir.schemas.wire.statistics.VersionCounters`."""
        return [] if self._cache is None else self._cache.counters.snapshot()

    async def close(self) -> None:
        """Stops sending; requests without a response end with UNAVAILABLE."""
        self._is_closed = True
        if self._opening is not None:
            self._opening.cancel()
        if self._expiry is not None:
            self._expiry.cancel()
        if self._inference is not None:
            await self._inference.stop(0)
        if self._payloads is not None:
            self._payloads.close()

    @property
    def _dispatcher(self) -> RequestDispatcher:
        if self._inference is None or not self._is_open:
            raise _unreachable()
        return self._inference

    async def _open(self) -> None:
        self._payloads = PayloadStore(PayloadArena(f"{self._worker_id}_asks"), self.registry.model_shares_memory)
        self._cache = await self._open_cache()
        inference = self._inference = RequestDispatcher(
            self._bus,
            self._worker_id,
            self.catalog,
            self._payloads,
            DispatchOptions(
                tracing=PassedTraces(),
                cache=self._cache,
                fetcher=self._options.fetcher,
                keeps_references=True,
                direct=self._options.direct,
            ),
        )
        await _retry(partial(inference.start, self._background))
        await _retry(self.readiness.start)
        await _retry(partial(self._known.start, is_maker=False))
        await _retry(partial(self.registry.start, self._background))
        self._expiry = self._background.create_task(self._expire())
        self._is_open = True

    async def _open_cache(self) -> ResponseCache | None:
        config = self._options.cache
        if config is None:
            return None
        with_summaries = self._options.summary_latencies
        cache = ResponseCache(self._bus, self._worker_id, self.catalog, self.registry, config, with_summaries)
        try:
            await _retry(cache.start)
        except WeirError as error:
            logger.warning("requests of this worker itself do not use the response cache: %s", error.message)
            return None
        return cache

    async def _expire(self) -> None:
        while True:
            await next_tick(_EXPIRY_INTERVAL_S)
            if self._bus.is_connected:
                call_each("weir.worker.backend_api.inference_client: a tick", [self.registry.expire, *self._on_tick])


async def _retry(start: Callable[[], Awaitable[None]]) -> None:
    """Starts something that needs the broker, repeatedly while the broker is not available."""
    is_logged = False
    while True:
        try:
            await start()
            return
        except (NatsError, OSError, TimeoutError) as error:
            if not is_logged:
                logger.warning(
                    "this worker can't send requests itself yet, retrying: %s: %s", type(error).__name__, error
                )
            is_logged = True
            await asyncio.sleep(_RETRY_S)


def _unreachable() -> WeirError:
    return overloaded("the message broker is not available", reason=Reason.BROKER_AWAY)

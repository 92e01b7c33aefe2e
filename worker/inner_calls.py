"""`InnerCalls`: how a worker asks models itself, for the steps of ensembles and for Python models that call others.

It asks through the bus as a gateway does, under the worker's id: so the request passes the asked model's own queue,
limits and statistics, and runs wherever that model is served. Large outputs stay in the memory of the worker that made
them: a response holds a `PayloadRef`, which may be passed on as the input of another request or handed on in an answer.
Each reference is given back once, by `release`, unless it was handed on.

A worker that never asks pays for none of it: `open` listens to the registry and for answers when it is first called. A
broker that is away then is waited for: who asks meanwhile is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from nats.errors import Error as NatsError

from bus.connection import Bus
from bus.known_models import KnownModels
from bus.payload_fetcher import PayloadFetcher
from bus.payloads import PayloadArena
from bus.registry import RegistryView
from calls.cache_config import CacheConfig
from calls.catalog import Catalog
from calls.inference import Inference
from calls.payload_store import PayloadStore
from calls.pending import OnAnswer, Pending
from calls.readiness import Readiness
from calls.response_cache import ResponseCache
from calls.tracing import PassedTraces
from runtime.containment import contained
from schemas.errors import Reason, WeirError, overloaded
from schemas.requests import InferRequest
from schemas.tensors import PayloadRef

logger = logging.getLogger("weir.worker")

OPEN_PATIENCE_S = 10.0
"""How long the first to ask waits for a broker that is away."""

_EXPIRY_INTERVAL_S = 1.0
_RETRY_S = 0.1


class InnerCalls:
    """See the module. Everything runs in the worker's event loop; tasks live in `background`.

    `cache_config` is the response cache that what is asked here may be answered from, `has_summaries` whether its counters
    have sketches of latencies; `fetcher` brings payloads of other hosts.
    """

    def __init__(
        self,
        bus: Bus,
        worker_id: str,
        background: asyncio.TaskGroup,
        cache_config: CacheConfig | None = None,
        has_summaries: bool = False,
        fetcher: PayloadFetcher | None = None,
    ) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._background = background
        self._opening: asyncio.Task[None] | None = None
        self._expiry: asyncio.Task[None] | None = None
        self._payloads: PayloadStore | None = None
        self._inference: Inference | None = None
        self._cache_config = cache_config
        self._has_summaries = has_summaries
        self._fetcher = fetcher
        self._cache: ResponseCache | None = None
        self._is_open = False
        self._is_closed = False
        self._on_tick: list[Callable[[], None]] = []
        self.registry = RegistryView(bus)
        self.catalog = Catalog(self.registry, strict_readiness=False)
        self._known = KnownModels(bus)
        self.catalog.keep(self._known)
        self.readiness = Readiness(bus, worker_id, self.catalog)

    @property
    def is_open(self) -> bool:
        """Whether models can be asked."""
        return self._is_open

    def start_to_open(self) -> None:
        """As `open`, for who need not wait for it."""
        if self._opening is None and not self._is_closed:
            self._opening = self._background.create_task(self._open())

    async def open(self) -> None:
        """Returns when models can be asked; the first call makes everything, later ones cost nothing.

        Raises WeirError (UNAVAILABLE) where the broker does not let that be within `OPEN_PATIENCE_S`; it is tried on.
        """
        if self._is_open:
            return
        self.start_to_open()
        if self._opening is not None:
            await asyncio.wait({self._opening}, timeout=OPEN_PATIENCE_S)
        if not self._is_open:
            raise _unreachable()

    def each_second(self, listener: Callable[[], None]) -> None:
        """`listener()` about once a second: the catalog waits for models whose workers have gone, but not for ever."""
        self._on_tick.append(listener)

    def submit(self, request: InferRequest, on_answer: OnAnswer) -> Pending:
        """Asks a model; `on_answer(response or error or None, is it the last?)` is called later, from the event loop.

        With `request.wants_moments`, the returned object's `moments` are those of the answer while that is told.
        `on_answer` owns the references in a response from then on. Raises WeirError for what is refused at once, as a
        gateway does, and for everything before `open` has returned.
        """
        return self._asking.submit(request, on_answer)

    def abandon(self, pending: Pending) -> None:
        """Nobody waits for the answer any more: nothing is told, and what still comes is given back."""
        self._asking.abandon(pending)

    def release(self, ref: PayloadRef) -> None:
        """Gives an output back to the worker in whose memory it lies."""
        self._asking.release(ref)

    def cache_counters(self) -> list[dict[str, Any]]:
        """What was answered from the cache, or might have been, in the form of `schemas.statistics.VersionCounters`."""
        return [] if self._cache is None else self._cache.counters.snapshot()

    async def close(self) -> None:
        """Asks no more: what has no answer ends with UNAVAILABLE."""
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
    def _asking(self) -> Inference:
        if self._inference is None or not self._is_open:
            raise _unreachable()
        return self._inference

    async def _open(self) -> None:
        self._payloads = PayloadStore(PayloadArena(f"{self._worker_id}_asks"), self.registry.model_shares_memory)
        self._cache = await self._opened_cache()
        inference = self._inference = Inference(
            self._bus,
            self._worker_id,
            self.catalog,
            self._payloads,
            tracing=PassedTraces(),
            keeps_references=True,
            cache=self._cache,
            fetcher=self._fetcher,
        )
        await _persist(partial(inference.start, self._background))
        await _persist(self.readiness.start)
        await _persist(partial(self._known.start, self._background))
        await _persist(partial(self.registry.start, self._background))
        self._expiry = self._background.create_task(self._expire())
        self._is_open = True

    async def _opened_cache(self) -> ResponseCache | None:
        if self._cache_config is None:
            return None
        bus, registry = self._bus, self.registry
        cache = ResponseCache(bus, self._worker_id, self.catalog, registry, self._cache_config, self._has_summaries)
        try:
            await _persist(cache.start)
        except WeirError as error:
            logger.warning("models are asked from here without a response cache: %s", error.message)
            return None
        return cache

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_INTERVAL_S)
            if self._bus.is_connected:
                self._tick(self.registry.expire)
                for listener in self._on_tick:
                    self._tick(listener)

    @contained()
    def _tick(self, listener: Callable[[], object]) -> None:
        listener()


async def _persist(start: Callable[[], Awaitable[None]]) -> None:
    """Starts something that needs the broker, again and again while that is away."""
    is_told = False
    while True:
        try:
            await start()
            return
        except (NatsError, OSError, TimeoutError) as error:
            if not is_told:
                logger.warning("models can't be asked from here yet: %s: %s", type(error).__name__, error)
            is_told = True
            await asyncio.sleep(_RETRY_S)


def _unreachable() -> WeirError:
    return overloaded("the message broker is not available", reason=Reason.BROKER_AWAY)

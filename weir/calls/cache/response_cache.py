"""`ResponseCache`: responses to requests of the same content, for models whose configuration allows it (`response_cache`).

A request is looked up before it is queued, and its response is stored when it comes. An entry belongs to one load of
one version: it is not found after a reload, or while workers have different files of the version. Requests with tensors
in memory of clients are not looked up, since clients may change that memory at any time; nor are requests of more than
`MAX_HASHED_BYTES`. A failure of the cache is contained: the request runs as if there were no cache.

Sources: Triton's response cache, its statistics extension and metrics, and a running Triton 2.51. Triton hashes the
model's name, its version, and the names and bytes of inputs to 64 bits. The key here also covers shapes, datatypes,
requested outputs and parameters, all of which a response may depend on, and is long enough that keys do not collide.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from weir.bus.kv.registry import RegistryView
from weir.bus.nats.connection import Bus
from weir.bus.payloads.arena import StalePayload
from weir.calls.cache.config import NATS, CacheConfig
from weir.calls.cache.stores import CachedOutput, CachedResponse, LocalCache, SharedCache
from weir.calls.catalog import Catalog, ServedModel
from weir.repository.dependencies import step_identity
from weir.runtime.containment import contained
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.core.tensors import PayloadRef, Reference
from weir.schemas.wire.codec import encode
from weir.telemetry.instruments import DurationHistogram, RecentDurations

logger = logging.getLogger("weir.calls")

KEY_BYTES = 32

MAX_HASHED_BYTES = 16 << 20
"""Content of a request that is looked up: it is hashed in the event loop, about 1 ms for each MiB."""

_MAX_DEPTH = 32  # of ensembles in ensembles

CopyOf = Callable[[PayloadRef], bytes]

VersionKey = tuple[str, int]
"""A model's name and a version."""


def cache_key(model: str, version: int, load: str, request: InferRequest) -> bytes:
    """The key of a request whose inputs are in the request; `load` is the load digest of the version.

    It does not depend on the request's id, priority and timeout, since no response does. Requests of an owner that keeps
    its responses to itself have keys of their own.
    """
    inputs = sorted(request.inputs, key=lambda tensor: tensor.name)
    facts = (
        model,
        version,
        load,
        [(tensor.name, tensor.datatype, list(tensor.shape), tensor.size_bytes) for tensor in inputs],
        [output.name for output in request.outputs],
        sorted((request.parameters or {}).items()),
        request.correlation_id,
        request.sequence_flags,
        *((request.owner,) if request.owner else ()),
    )
    # The facts contain the sizes of all contents, so different requests never hash the same bytes.
    digest = hashlib.blake2b(encode(facts), digest_size=KEY_BYTES)
    for tensor in inputs:
        digest.update(tensor.data)  # type: ignore[arg-type]
    return digest.digest()


class _VersionCounts:
    """The counts of one version: each [count, nanoseconds]."""

    def __init__(self, has_summaries: bool) -> None:
        self.hits = [0, 0]
        self.misses = [0, 0]
        self.latency = DurationHistogram()  # of hits
        names = ("queue", "cache_hit", "cache_miss") if has_summaries else ()
        self.summaries = {name: RecentDurations() for name in names}

    def add(self, kind: str, total: list[int], ns: int) -> None:
        total[0] += 1
        total[1] += ns
        if self.summaries:
            self.summaries[kind].add(ns // 1000)
            if kind == "cache_hit":
                self.summaries["queue"].add(0)


class CacheCounters:
    """The hits and misses of one caller, by Triton's counting rules.

    A hit counts as a success with its own duration and as a queued request, but not as a run of the model. A miss is
    counted when the response is stored, so never for an error; its duration is that of the lookup and of storing the
    response, and adds to the request's.
    """

    def __init__(self, has_summaries: bool = False) -> None:
        self._has_summaries = has_summaries
        self._counts: dict[VersionKey, _VersionCounts] = {}

    def hit(self, key: VersionKey, ns: int) -> None:
        """Counts a request that was answered from the cache."""
        counts = self._of(key)
        counts.add("cache_hit", counts.hits, ns)
        counts.latency.add_all((ns,))

    def miss(self, key: VersionKey, ns: int) -> None:
        """Counts a request that was answered by the model."""
        counts = self._of(key)
        counts.add("cache_miss", counts.misses, ns)

    def versions(self) -> list[VersionKey]:
        """The versions with counts."""
        return list(self._counts)

    def forget(self, key: VersionKey) -> None:
        """Removes the counts of a version that was unloaded."""
        self._counts.pop(key, None)

    def snapshot(self) -> list[dict[str, Any]]:
        """All counts, in the form of `weir.schemas.wire.statistics.VersionCounters`."""
        return [_to_statistics(key, counts) for key, counts in self._counts.items()]

    def _of(self, key: VersionKey) -> _VersionCounts:
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = _VersionCounts(self._has_summaries)
        return counts


def _to_statistics(key: VersionKey, counts: _VersionCounts) -> dict[str, Any]:
    hits, hits_ns = counts.hits
    return {
        "model": key[0],
        "version": key[1],
        "success": [hits, hits_ns + counts.misses[1]],
        "queue": [hits, 0],
        **{name: [0, 0] for name in ("fail", "compute_input", "compute_infer", "compute_output")},
        "inference_count": 0,
        "execution_count": 0,
        "last_inference_ms": 0,
        "failures": {},
        "cache_hit": list(counts.hits),
        "cache_miss": list(counts.misses),
        "latency": counts.latency.buckets(),
        "summaries": {name: summary.snapshot() for name, summary in counts.summaries.items()},
    }


class CacheLookup(msgspec.Struct, eq=False):
    """The lookup of a request: its `key`, the load of its version, and the `response` once one is found.

    `started_ns` is when it began, `ns` how long it has taken.
    """

    key: bytes
    model: str
    version: int
    load: str
    started_ns: int
    ns: int = 0
    response: CachedResponse | None = None


class ResponseCache:
    """The cache of one caller; everything runs in its event loop. `counters` are its hits and misses."""

    def __init__(  # noqa: PLR0913 - each is another service of the role
        self,
        bus: Bus,
        caller_id: str,
        catalog: Catalog,
        registry: RegistryView,
        config: CacheConfig,
        has_summaries: bool = False,
    ) -> None:
        self._catalog = catalog
        self.is_per_owner: Callable[[], bool] = lambda: False
        """Whether a response is for requests of the same owner alone."""
        self._local: LocalCache | None = None
        self._shared: SharedCache | None = None
        if config.kind == NATS:
            self._shared = SharedCache(bus, caller_id, config.size_bytes, config.ttl_s)
        else:
            self._local = LocalCache(config.size_bytes)
        self.counters = CacheCounters(has_summaries)
        self._logged_too_large: set[str] = set()
        registry.on_model_change(self._forget_unloaded)

    @property
    def is_shared(self) -> bool:
        """Whether a lookup needs `fetch` to find its response."""
        return self._shared is not None

    @property
    def malformed_messages(self) -> int:
        """Entries of the shared cache that could not be decoded."""
        return 0 if self._shared is None else self._shared.malformed_messages

    async def start(self) -> None:
        """Creates the shared cache. Raises WeirError when the broker has no room for it."""
        if self._shared is not None:
            await self._shared.start()

    @contained()
    def look_up(self, model: ServedModel, request: InferRequest) -> CacheLookup | None:
        """The lookup of a checked request, with its response if it is in the local cache; None if it cannot be cached."""
        started_ns = time.perf_counter_ns()
        if request.regions or any(isinstance(tensor.data, tuple) for tensor in request.inputs):
            return None
        if sum(tensor.size_bytes for tensor in request.inputs) > MAX_HASHED_BYTES:
            return None
        version = int(request.model_version or model.latest)
        load = self._load(model, version)
        if not load:
            return None
        key = cache_key(model.name, version, load, request)
        lookup = CacheLookup(key, model.name, version, load, started_ns)
        if self._local is not None:
            lookup.response = self._local.find(key)
        lookup.ns = time.perf_counter_ns() - started_ns
        return lookup

    def fetch(self, lookup: CacheLookup, on_found: Callable[[], None]) -> None:
        """Calls `on_found`, later, when the shared cache has found the response or has none."""
        assert self._shared is not None  # noqa: S101 - `is_shared`

        def found(response: CachedResponse | None) -> None:
            lookup.ns = time.perf_counter_ns() - lookup.started_ns
            if response is not None and response.version == lookup.version:
                lookup.response = response
            on_found()

        self._shared.find(lookup.key, found)

    def hit(self, lookup: CacheLookup, id: str) -> InferResponse | None:
        """The found response for the request with this id, which counts as a hit; None if none was found."""
        if lookup.response is None:
            return None
        self.counters.hit((lookup.model, lookup.version), time.perf_counter_ns() - lookup.started_ns)
        return lookup.response.response(lookup.model, id)

    @contained()
    def store(self, lookup: CacheLookup, version: int, response: InferResponse, copy_of: CopyOf) -> None:
        """Stores the response of `version`, which counts as a miss; `copy_of` copies content out of a worker's memory."""
        started_ns = time.perf_counter_ns()
        model = self._catalog.served_model(lookup.model)
        # The model may have been reloaded since the lookup.
        if model is not None and version == lookup.version and self._load(model, version) == lookup.load:
            try:
                cached = _cached(version, response, copy_of)
            except (StalePayload, ValueError):
                pass  # the worker whose memory held the content is gone
            else:
                if not self._insert(lookup.key, cached):
                    self._log_too_large(lookup.model, cached.size_bytes)
        self.counters.miss((lookup.model, lookup.version), lookup.ns + time.perf_counter_ns() - started_ns)

    def _insert(self, key: bytes, response: CachedResponse) -> bool:
        if self._shared is not None:
            return self._shared.insert(key, response)
        assert self._local is not None  # noqa: S101 - there is one of the two
        return self._local.insert(key, response)

    def _load(self, model: ServedModel, version: int, depth: int = 0) -> str:
        """The load digest of this version, "" where its responses cannot be cached.

        That of an ensemble changes with every model in it. The responses of an ensemble with a decoupled or stateful model
        cannot be cached.
        """
        load = model.loads.get(version, "")
        ensemble = model.config.ensemble_scheduling
        if ensemble is None or not load:
            return load
        loads = [load]
        for step in ensemble.step:
            composing = self._catalog.served_model(step_identity(step))
            if composing is None or composing.config.is_decoupled or composing.config.sequence_batching:
                return ""
            if depth >= _MAX_DEPTH:
                return ""
            number = int(composing.latest) if step.model_version < 0 else step.model_version
            composing_load = self._load(composing, number, depth + 1)
            if not composing_load:
                return ""
            loads.append(composing_load)
        return "(" + " ".join(loads) + ")"

    def _log_too_large(self, model: str, size_bytes: int) -> None:
        if model not in self._logged_too_large:
            self._logged_too_large.add(model)
            logger.warning("a response of model %s is too large for the response cache: %d bytes", model, size_bytes)

    def _forget_unloaded(self, model: str) -> None:
        served = self._catalog.served_model(model)
        for name, version in self.counters.versions():
            if name == model and (served is None or version not in served.versions):
                self.counters.forget((name, version))


def _cached(version: int, response: InferResponse, copy_of: CopyOf) -> CachedResponse:
    outputs = (
        CachedOutput(tensor.name, tensor.datatype, tuple(tensor.shape), _content(tensor.data, copy_of))
        for tensor in response.outputs
    )
    return CachedResponse(version, tuple(outputs), response.parameters)


def _content(data: bytes | memoryview | Reference, copy_of: CopyOf) -> bytes:
    if isinstance(data, PayloadRef):
        return copy_of(data)
    return data if isinstance(data, bytes) else bytes(data)  # type: ignore[arg-type]

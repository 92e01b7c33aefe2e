"""`ResponseCache`: answers to what was asked before, for models whose configuration allows it (`response_cache`).

A request is looked up before it is queued, and its answer is kept when it has come. What is kept belongs to one load of one
version: after a reload, or while workers have different files of the version, it is not found. Not looked up are requests
whose tensors lie in memory of clients, which can change them at any time, and which no answer of ours would reach; nor
those of more than `MAX_HASHED_BYTES`.
A failure of the cache itself is contained: the request is run as if there were no cache.
Source: Triton's response cache.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from bus.connection import Bus
from bus.payloads import StalePayload
from bus.registry import RegistryView
from calls.cache_config import NATS, CacheConfig
from calls.cache_counters import CacheCounters
from calls.cache_key import cache_key
from calls.cached_answer import CachedAnswer, CachedOutput
from calls.catalog import Catalog, ServedModel
from calls.local_cache import LocalCache
from calls.shared_cache import SharedCache
from repository.dependencies import step_identity
from runtime.containment import contained
from schemas.requests import InferRequest, InferResponse
from schemas.tensors import PayloadRef, Reference

logger = logging.getLogger("weir.calls")

MAX_HASHED_BYTES = 16 << 20
"""Content of a request that is looked up: it is hashed in the event loop, about 1 ms for each MiB."""

_MAX_DEPTH = 32  # of ensembles in ensembles

CopyOf = Callable[[PayloadRef], bytes]


class Question:
    """A request as the cache knows it: its `key`, the load of the version it is for, and `answer` once one was found.

    `begun_ns` is when it was asked, `ns` how long the cache took for it so far.
    """

    __slots__ = ("answer", "begun_ns", "key", "load", "model", "ns", "version")

    def __init__(self, key: bytes, model: str, version: int, load: str, begun_ns: int) -> None:
        self.key = key
        self.model = model
        self.version = version
        self.load = load
        self.begun_ns = begun_ns
        self.ns = 0
        self.answer: CachedAnswer | None = None


class ResponseCache:
    """The cache of one caller; everything runs in its event loop. `counters` are its hits and misses."""

    def __init__(
        self,
        bus: Bus,
        caller_id: str,
        catalog: Catalog,
        registry: RegistryView,
        config: CacheConfig,
        has_summaries: bool = False,
    ) -> None:
        self._catalog = catalog
        self._local: LocalCache | None = None
        self._shared: SharedCache | None = None
        if config.kind == NATS:
            self._shared = SharedCache(bus, caller_id, config.size_bytes, config.ttl_s)
        else:
            self._local = LocalCache(config.size_bytes)
        self.counters = CacheCounters(has_summaries)
        self._told_too_large: set[str] = set()
        registry.on_model_change(self._forget_unloaded)

    @property
    def answers_later(self) -> bool:
        """Whether a question has its answer only after `find`."""
        return self._shared is not None

    @property
    def malformed_messages(self) -> int:
        """What was found in a shared cache and is no answer."""
        return 0 if self._shared is None else self._shared.malformed_messages

    async def start(self) -> None:
        """Makes what is needed. Raises WeirError when the broker has no room for it."""
        if self._shared is not None:
            await self._shared.start()

    @contained()
    def ask(self, model: ServedModel, request: InferRequest) -> Question | None:
        """The question that a checked request is, with its answer if it is here; None where there can't be one."""
        begun_ns = time.perf_counter_ns()
        if request.regions or any(isinstance(tensor.data, tuple) for tensor in request.inputs):
            return None
        if sum(tensor.size_bytes for tensor in request.inputs) > MAX_HASHED_BYTES:
            return None
        version = int(request.model_version or model.latest)
        load = self._load(model, version)
        if not load:
            return None
        key = cache_key(model.name, version, load, request)
        question = Question(key, model.name, version, load, begun_ns)
        if self._local is not None:
            question.answer = self._local.find(key)
        question.ns = time.perf_counter_ns() - begun_ns
        return question

    def find(self, question: Question, on_found: Callable[[], None]) -> None:
        """Calls `on_found`, later, when the question has its answer, or there is none."""
        assert self._shared is not None  # noqa: S101 - see `answers_later`

        def found(answer: CachedAnswer | None) -> None:
            question.ns = time.perf_counter_ns() - question.begun_ns
            if answer is not None and answer.version == question.version:
                question.answer = answer
            on_found()

        self._shared.find(question.key, found)

    @contained()
    def take(self, question: Question, id: str) -> InferResponse | None:
        """The answer for the request with this id, which counts as a hit; None where the question has none."""
        if question.answer is None:
            return None
        self.counters.hit((question.model, question.version), time.perf_counter_ns() - question.begun_ns)
        return question.answer.response(question.model, id)

    @contained()
    def keep(self, question: Question, version: int, response: InferResponse, copy_of: CopyOf) -> None:
        """Keeps the answer of `version`, which counts as a miss; `copy_of` copies content out of a worker's memory."""
        begun_ns = time.perf_counter_ns()
        model = self._catalog.served_model(question.model)
        # The model may have been loaded anew since it was asked.
        if model is not None and version == question.version and self._load(model, version) == question.load:
            try:
                answer = _cached(version, response, copy_of)
            except (StalePayload, ValueError):
                pass  # the worker that had the content in its memory is gone
            else:
                if not self._insert(question.key, answer):
                    self._tell_too_large(question.model, answer.size_bytes)
        self.counters.miss((question.model, question.version), question.ns + time.perf_counter_ns() - begun_ns)

    def _insert(self, key: bytes, answer: CachedAnswer) -> bool:
        if self._shared is not None:
            return self._shared.insert(key, answer)
        assert self._local is not None  # noqa: S101 - there is one of the two
        return self._local.insert(key, answer)

    def _load(self, model: ServedModel, version: int, depth: int = 0) -> str:
        """What tells loads of this version apart, "" where its answers can't be kept.

        Those of an ensemble change with every model in it, and can be kept if none of them keeps state or streams.
        """
        load = model.loads.get(version, "")
        ensemble = model.config.ensemble_scheduling
        if ensemble is None or not load:
            return load
        loads = [load]
        for step in ensemble.step:
            part = self._catalog.served_model(step_identity(step))
            if part is None or part.config.is_decoupled or part.config.sequence_batching or depth >= _MAX_DEPTH:
                return ""
            number = int(part.latest) if step.model_version < 0 else step.model_version
            of_part = self._load(part, number, depth + 1)
            if not of_part:
                return ""
            loads.append(of_part)
        return "(" + " ".join(loads) + ")"

    def _tell_too_large(self, model: str, size_bytes: int) -> None:
        if model not in self._told_too_large:
            self._told_too_large.add(model)
            logger.warning("an answer of model %s is too large for the response cache: %d bytes", model, size_bytes)

    @contained()
    def _forget_unloaded(self, model: str) -> None:
        served = self._catalog.served_model(model)
        for name, version in self.counters.versions():
            if name == model and (served is None or version not in served.versions):
                self.counters.forget((name, version))


def _cached(version: int, response: InferResponse, copy_of: CopyOf) -> CachedAnswer:
    outputs = (
        CachedOutput(tensor.name, tensor.datatype, tuple(tensor.shape), _content(tensor.data, copy_of))
        for tensor in response.outputs
    )
    return CachedAnswer(version, tuple(outputs), response.parameters)


def _content(data: bytes | memoryview | Reference, copy_of: CopyOf) -> bytes:
    if isinstance(data, PayloadRef):
        return copy_of(data)
    return data if isinstance(data, bytes) else bytes(data)  # type: ignore[arg-type]

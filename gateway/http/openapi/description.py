"""`ApiDescription`: the OpenAPI document of a gateway, kept until a model changes.

The part of a model is made once for each state of the model. A document of hundreds of models takes tens of milliseconds,
so it is made in slices, between which the event loop goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import orjson

from weir.calls.catalog import ServedModel
from weir.gateway.http.openapi.document import document
from weir.gateway.http.openapi.models import model_paths, model_tag

MAX_MODEL_BYTES = 64 << 10
"""The largest part of one model; the paths of a model with a larger one are left out."""

MAX_MODELS_BYTES = 8 << 20
"""The parts of all models; the paths of the models beyond it are left out."""

SLICE_S = 0.002


class Description(NamedTuple):
    """A document in JSON with its entity tag. `left_out` is the number of models without paths of their own."""

    body: bytes
    etag: str
    left_out: int


class _Part(NamedTuple):
    served: ServedModel
    tag: bytes
    paths: bytes  # the members of the object, without its braces; empty for a model that is left out


class ApiDescription:
    """Makes the document of `routes` and of the models that `served_models` returns.

    `shows_config`: the document may contain what the configurations of models contain, beyond their metadata.
    """

    def __init__(
        self, routes: Iterable[Any], served_models: Callable[[], list[ServedModel]], shows_config: bool = True
    ) -> None:
        self._routes = routes
        self._served_models = served_models
        self._shows_config = shows_config
        self._parts: dict[str, _Part] = {}
        self._made: Description | None = None
        self._models: list[ServedModel] = []
        self._making = asyncio.Lock()
        self._general: tuple[bytes, bytes] | None = None

    async def current(self) -> Description:
        """The document of the models as they are now."""
        async with self._making:
            models = self._served_models()
            # A model that has changed is another object.
            if self._made is None or models != self._models:
                self._made, self._models = await self._make(models), list(models)
            return self._made

    async def _make(self, models: list[ServedModel]) -> Description:
        parts: dict[str, _Part] = {}
        slice_end_s = time.monotonic() + SLICE_S
        for served in models:
            known = self._parts.get(served.name)
            parts[served.name] = known if known is not None and known.served is served else self._part(served)
            if time.monotonic() >= slice_end_s:
                await asyncio.sleep(0)
                slice_end_s = time.monotonic() + SLICE_S
        self._parts = parts
        shown, size = [], 0
        for part in parts.values():
            size += len(part.paths)
            if part.paths and size <= MAX_MODELS_BYTES:
                shown.append(part)
        head, paths = self._general_parts()
        left_out = len(parts) - len(shown)
        body = b'%b,"x-models-left-out":%d,"tags":[%b],"paths":{%b}}' % (
            head,
            left_out,
            b",".join(part.tag for part in shown),
            b",".join([*(part.paths for part in shown), paths]),
        )
        return Description(body, f'"{hashlib.blake2b(body, digest_size=16).hexdigest()}"', left_out)

    def _part(self, served: ServedModel) -> _Part:
        paths = orjson.dumps(model_paths(served, self._shows_config))[1:-1]
        if len(paths) > MAX_MODEL_BYTES:
            paths = b""
        return _Part(served, orjson.dumps(model_tag(served)), paths)

    def _general_parts(self) -> tuple[bytes, bytes]:
        """The document up to its tags, and the members of its paths, without those of models."""
        if self._general is None:
            general = document(self._routes, "/")
            paths = general.pop("paths")
            self._general = orjson.dumps(general)[:-1], orjson.dumps(paths)[1:-1]
        return self._general

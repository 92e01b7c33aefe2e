"""SageMaker's multi-model endpoints: models that the service loads, lists, asks and unloads by `/models`.

SageMaker unpacks the archive of a model in a folder of its own and registers that folder, which holds one model, or an
ensemble with its models. State lies in the bucket of desired models, so every gateway has it, and it survives restarts
of all roles.
Source: `sagemaker_server.cc` of Triton's server, and the answers of a running Triton 2.51.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from weir.access.policy.actions import Action
from weir.gateway.context import GatewayContext
from weir.gateway.http.app import Gatekeeper
from weir.gateway.http.routing import json_response, read_short_body
from weir.http_server.door import HttpDoor, allows, check_model
from weir.http_server.responses import error_response, weir_error_response
from weir.http_server.routing import Route
from weir.schemas.core.errors import ErrorCode, WeirError, internal, invalid
from weir.schemas.kserve.json_documents import load_json
from weir.schemas.wire.model_control import RegisteredFolder
from weir.schemas.wire.registry import ModelState

logger = logging.getLogger("weir.gateway")

TARGET_HEADER = "X-Amzn-SageMaker-Target-Model"
OUT_OF_MEMORY_STATUS = 507
"""With this status SageMaker unloads other models and tries again."""

UNLOAD_TIMEOUT_S = 350.0
"""How long an unload waits for running requests; SageMaker gives up after 360 s."""

_UNLOAD_POLL_S = 0.2
_HELD = (ModelState.READY, ModelState.UNLOADING)
_BY = "SageMaker"
_RESTRICTED_AS = "/v2/repository/index"
_CONFIG = "config.pbtxt"
_ENSEMBLE = re.compile(r'platform:\s*"ensemble"')
_OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUDA_OUT_OF_MEMORY",
    "Out of memory",
    "Out Of Memory",
    "out of memory",
    "MemoryError",
    "OutOfMemory",
    "OOM",
    "Dst tensor is not initialized",
    "Src tensor is not initialized",
    "CNMEM_STATUS_OUT_OF_MEMORY",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "Failed to allocate memory",
    "failed to allocate memory",
    "No space left on device",
)


def status_of(error: WeirError) -> int:
    """The status of an error: 507 for a lack of memory, 503 and 429 for a server that is busy, else 400."""
    if any(text in error.message for text in _OUT_OF_MEMORY):
        return OUT_OF_MEMORY_STATUS
    return error.http_status if error.retry_after_s else 400


class Archive(NamedTuple):
    """What a registered folder holds: the repository, the folder of the model, and those of an ensemble's models."""

    repository: Path
    model: Path
    composing: tuple[Path, ...] = ()


def read_archive(url: str, root: Path) -> Archive:
    """Looks into the folder `url`, which must lie in `root`. Raises WeirError, in Triton's words. Blocking."""
    folder = Path(url)
    if not folder.is_absolute() or not folder.resolve().is_relative_to(root.resolve()):
        raise invalid(f"failed to register '{url}', it must be a folder in {root}")
    folder = folder.resolve()
    if not folder.is_dir():
        raise invalid(f"failed to register '{url}', repository not found")
    if (folder / _CONFIG).is_file():
        return Archive(folder.parent, folder)
    models = sorted(one for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))
    if not models:
        raise invalid(f"failed to register '{url}', it has no folder of a model")
    ensembles = [one for one in models if _is_ensemble(one / _CONFIG)]
    if len(models) > 1 and len(ensembles) != 1:
        raise invalid(
            f"failed to register '{url}', it has {len(models)} folders: expected one model, or one ensemble with its models"
        )
    model = ensembles[0] if len(models) > 1 else models[0]
    return Archive(folder, model, tuple(one for one in models if one != model))


def _is_ensemble(config: Path) -> bool:
    return config.is_file() and _ENSEMBLE.search(config.read_text(errors="replace")) is not None


class MultiModel:
    """The registered models of a server. Folders must lie in `root`."""

    def __init__(self, context: GatewayContext, root: Path) -> None:
        self._context = context
        self._repository = context.repository
        self._root = root
        self._loading: set[str] = set()  # names that loads in progress will take

    def app(self) -> Starlette:
        """The ASGI application of `/models` and `/models/<name>`."""

        async def load(request: Request) -> Response:
            name, url = _load_request(load_json(await read_short_body(request)))
            model = request.headers.get(TARGET_HEADER, name)
            check_model(request, model)
            await self.load(name, url, model)
            return Response()

        async def models(request: Request) -> Response:
            catalog, registered = self._context.catalog, self._registered()
            ready = {
                name: folder
                for name, folder in registered.items()
                if catalog.served_model(name) is not None and allows(request, name)
            }
            return json_response({"models": [_row(folder) for folder in ready.values()]})

        async def model(request: Request) -> Response:
            _, folder = self._allowed(request)
            return json_response(_row(folder))

        async def unload(request: Request) -> Response:
            name, _ = self._allowed(request)
            await self._repository.unload(name, with_dependents=True, by=_BY)
            await self._wait_unloaded(name)
            return Response()

        app = Starlette(
            routes=[
                Route("/models", models, Action.METADATA, lists=True),
                Route("/models/", models, Action.METADATA, lists=True),
                Route("/models", load, Action.LOAD, methods=["POST"], lists=True),
                Route("/models/{name}", model, Action.METADATA, lists=True),
                Route("/models/{name}", unload, Action.LOAD, methods=["DELETE"], lists=True),
            ],
            exception_handlers={WeirError: _on_error, HTTPException: _on_unknown},
        )
        app.state.door = HttpDoor(self._context.gate, weir_error_response, "sagemaker")
        access, cross_site = self._context.access, self._context.cross_site
        for rejection in (
            lambda scope: cross_site.rejection(scope["method"], scope["path"], scope["headers"]),
            lambda scope: access.http_rejection(_RESTRICTED_AS, scope["headers"]),
        ):
            app.add_middleware(Gatekeeper, rejection=rejection)
        return app

    def model_of(self, name: str) -> str:
        """The model that SageMaker calls `name`. Raises WeirError (NOT_FOUND).

        With an access policy an unknown name is taken for a model's: what asks the gate then answers it as one that the
        caller may not know of.
        """
        if self._context.gate.is_on:
            return next((model for model, folder in self._registered().items() if folder.alias == name), name)
        return self._find(name)[0]

    async def load(self, name: str, url: str, model: str) -> None:
        """Registers the folder `url` as `name`, and loads `model` from it. Raises WeirError."""
        archive = await asyncio.to_thread(read_archive, url, self._root)
        registered, known = self._registered(), self._repository.registered()
        if any(folder.repository == str(archive.repository) for folder in registered.values()):
            text = f"model repository '{archive.repository}' has already been registered"
            raise WeirError(ErrorCode.ALREADY_EXISTS, text)
        aliases = {folder.alias for folder in registered.values()}
        names = {model, *(path.name for path in archive.composing)}
        keys = {str(archive.repository), *names}
        taken = sorted((names & known.keys()) | ({name} & aliases) | (keys & self._loading))
        if taken:
            text = f"failed to register '{taken[0]}', there is a conflicting mapping for '{taken[0]}'"
            raise WeirError(ErrorCode.ALREADY_EXISTS, text)
        self._loading |= keys
        try:
            await self._load(name, model, archive)
        finally:
            self._loading -= keys

    async def _load(self, name: str, model: str, archive: Archive) -> None:
        logger.info("SageMaker model '%s': loading '%s' from %s", name, model, archive.model)
        loaded: list[str] = []
        try:
            for path in archive.composing:
                await self._repository.load_registered(path.name, RegisteredFolder(str(path)), explicit=False, by=_BY)
                loaded.append(path.name)
            folder = RegisteredFolder(str(archive.model), str(archive.repository), name)
            await self._repository.load_registered(model, folder, by=_BY)
        except WeirError:
            for composing in loaded:
                await self._repository.unload(composing, with_dependents=False, by=_BY)
            raise

    async def _wait_unloaded(self, model: str) -> None:
        """Returns when the model takes no memory any more, or after `UNLOAD_TIMEOUT_S`."""
        end_s = time.monotonic() + UNLOAD_TIMEOUT_S
        while any(row["name"] == model and row.get("state") in _HELD for row in await self._repository.index(False)):
            if time.monotonic() > end_s:
                logger.error("SageMaker model '%s' was not unloaded within %.0f s", model, UNLOAD_TIMEOUT_S)
                return
            await asyncio.sleep(_UNLOAD_POLL_S)

    def _allowed(self, request: Request) -> tuple[str, RegisteredFolder]:
        """The model that the path names. Raises WeirError (NOT_FOUND), also where the sender may not know of it."""
        found = self._find(request.path_params["name"])
        if not allows(request, found[0]):
            raise _not_loaded(request.path_params["name"])
        return found

    def _registered(self) -> dict[str, RegisteredFolder]:
        return {name: folder for name, folder in self._repository.registered().items() if folder.alias}

    def _find(self, alias: str) -> tuple[str, RegisteredFolder]:
        for name, folder in self._registered().items():
            if folder.alias == alias:
                return name, folder
        raise _not_loaded(alias)


def _not_loaded(alias: str) -> WeirError:
    return WeirError(ErrorCode.NOT_FOUND, f"model '{alias}' is not loaded")


def _load_request(document: Any) -> tuple[str, str]:
    if not isinstance(document, dict):
        raise internal("attempt to get members for non-object")
    name, url = document.get("model_name", ""), document.get("url", "")
    if not isinstance(name, str) or not isinstance(url, str):
        raise internal("attempt to access JSON non-string as string")
    if not name:
        raise invalid("'model_name' must not be empty")
    return name, url


def _row(folder: RegisteredFolder) -> dict[str, str]:
    return {"modelName": folder.alias, "modelUrl": folder.repository}


async def _on_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, WeirError)  # noqa: S101 - registered for nothing else
    statuses = {ErrorCode.NOT_FOUND: 404, ErrorCode.ALREADY_EXISTS: 409}
    return error_response(statuses.get(error.code, status_of(error)), error.message)


async def _on_unknown(request: Request, _error: Exception) -> Response:
    return error_response(400, f"SageMaker requests for {request.method} {request.url.path} are not served")

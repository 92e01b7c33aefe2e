"""Routes that read: the session, the state of the cluster, series of the load, models and their details."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from weir.access.policy.actions import Action
from weir.calls.catalog import ServedModel
from weir.cluster.counters.version_totals import VersionTotals
from weir.console.api.context import AUTHORIZATION, MAX_ASKERS, ConsoleContext
from weir.console.api.responses import error_response, json_response, read_integer
from weir.console.history.series import MODEL_COLUMNS
from weir.http_server.door import gate_of, principal_of
from weir.http_server.routing import Route
from weir.schemas.core.names import model_path, plain_name
from weir.schemas.kserve.sample_inputs import declared_inputs, sample_body, sample_tensors
from weir.schemas.wire.registry import UNLOADED

MAX_SAMPLE_ELEMENTS = 65_536
"""The largest sample request that the server makes; for larger inputs the page makes the values itself."""

_NO_LOAD = dict.fromkeys(MODEL_COLUMNS)


def reading_routes(context: ConsoleContext) -> list[Route]:
    """The routes of `/api` that change nothing."""
    view = context.view
    pages = _TickCache(context)

    async def session(request: Request) -> Response:
        return json_response(
            {
                "release": context.release,
                "allow_changes": context.allows_changes,
                "denied": _why_not(request, Action.CONSOLE_CHANGE),
                "needs_key": context.gate.is_on,
                "cluster": {
                    "url": context.broker_url,
                    "access_file": context.access_file,
                    "nats_version": str(context.bus.server_info.get("version", "")),
                    "is_connected": view.is_connected,
                },
                "tick_ms": 1000,
                "now_ms": time.time_ns() // 1_000_000,
            }
        )

    async def status(request: Request) -> Response:
        return Response((await view.status()).model_dump_json(), media_type="application/json")

    async def series(request: Request) -> Response:
        model = request.query_params.get("model") or None
        since_ms = read_integer(request.query_params.get("since_ms", "0"))
        if since_ms is None:
            return error_response(400, f"since_ms must be a unix time in ms, not {request.query_params['since_ms']!r}")
        return json_response({"at_ms": view.tick.at_ms, "resolution": view.history.since(model, since_ms)})

    async def models(request: Request) -> Response:
        return Response(await pages.models(request), media_type="application/json")

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        served = view.catalog.served_model(name)
        if served is None and not any(row["name"] == name for row in await context.repository_index(request)):
            return error_response(404, f"there is no model '{name}'")
        return json_response(await _details(context, request, name, served))

    return [
        Route("/api/session", session, Action.CONSOLE_READ),
        Route("/api/status", status, Action.CONSOLE_READ),
        Route("/api/series", series, Action.CONSOLE_READ),
        Route("/api/models", models, Action.CONSOLE_READ),
        Route("/api/models/{name:path}", model, Action.CONSOLE_READ),
    ]


class _TickCache:
    """Answers that are built once for each tick and principal, however many pages ask."""

    def __init__(self, context: ConsoleContext) -> None:
        self._context = context
        self._number = -1
        self._models: dict[str, bytes] = {}

    async def models(self, request: Request) -> bytes:
        """The list of all models that the sender may see, with their load."""
        tick = self._context.view.tick
        if tick.number != self._number or len(self._models) >= MAX_ASKERS:
            self._number = tick.number
            self._models = {}
        pages, asker = self._models, AUTHORIZATION.get()
        page = pages.get(asker)
        if page is None:
            rows = await _model_rows(self._context, request)
            mode = self._context.view.control_mode
            page = pages[asker] = orjson.dumps({"at_ms": tick.at_ms, "control_mode": mode, "models": rows})
        return page


def _why_not(request: Request, action: Action, model: str = "") -> str:
    """Why the sender may not do this; "" where it may."""
    decision = gate_of(request).decide(principal_of(request), action, model)
    return "" if decision.is_allowed else decision.why


async def _model_rows(context: ConsoleContext, request: Request) -> list[dict[str, Any]]:
    """One row for each model that is served, known to the registry, or that lies in a repository."""
    view = context.view
    loads = view.tick.load.models if view.tick.load is not None else {}
    status = {(model.name, model.namespace): model for model in (await view.status()).models}
    rows: dict[str, dict[str, Any]] = {}
    for entry in view.catalog.index():
        name = entry["name"]
        served = view.catalog.served_model(name)
        namespace = "" if served is None else served.namespace
        known = status.get((plain_name(name), namespace))
        versions = [] if known is None else known.versions
        rows[name] = {
            "id": name,
            "name": plain_name(name),
            "namespace": namespace,
            "state": entry["state"],
            "reason": entry["reason"],
            "loaded": served is not None,
            "versions": [
                {
                    "version": version.version,
                    "state": version.state,
                    "share": version.share,
                    "instances": version.instances,
                    "busy": version.busy,
                }
                for version in versions
            ],
            "workers": 0 if known is None else len(known.workers),
            **loads.get(name, _NO_LOAD),
        }
    names = {row["name"] for row in rows.values()}  # the index has no namespaces
    for unserved in await context.repository_index(request):
        if unserved["name"] not in names:
            rows[unserved["name"]] = {
                "id": unserved["name"],
                "name": unserved["name"],
                "namespace": "",
                "state": unserved.get("state", ""),
                "reason": unserved.get("reason", ""),
                "loaded": False,
                "versions": [],
                "workers": 0,
                **_NO_LOAD,
            }
    return [rows[name] for name in sorted(rows)]


async def _details(context: ConsoleContext, request: Request, name: str, served: ServedModel | None) -> dict[str, Any]:
    """Everything about one model; without its configuration and statistics while no worker serves it.

    `denied` has why the sender may not see what a gateway would have.
    """
    path = model_path(name)
    denied: dict[str, str] = {}

    async def read(field: str, action: Action, path: str) -> Any:
        # A request that a gateway would refuse would be an event of the audit log, every other second.
        why = _why_not(request, action, name)
        if why:
            denied[field] = why
            return None
        return await context.read_gateway(path)

    history, traffic = await asyncio.gather(
        read("history", Action.LOAD, f"{path}/history"), read("traffic", Action.TRAFFIC, f"{path}/traffic")
    )
    rows: list[dict[str, Any]] = []
    if served is not None:
        totals = context.view.statistics.versions()
        rows = [
            (totals.get((name, version)) or VersionTotals(name, version)).triton_row() for version in served.versions
        ]
    return {
        "id": name,
        "name": plain_name(name),
        "versions": [] if served is None else served.versions,
        "metadata": None if served is None else await read("metadata", Action.METADATA, path),
        "config": None if served is None else served.config.model_dump(mode="json", exclude_defaults=True),
        "reason": "" if served is not None else await _reason(context, request, name),
        "completed": [] if served is None else list(served.completed),
        "statistics": rows,
        "history": history,
        "traffic": traffic,
        "labels": {} if served is None else {output: len(labels) for output, labels in served.labels.items()},
        **_sample(served),
        "denied": denied,
    }


async def _reason(context: ConsoleContext, request: Request, name: str) -> str:
    """Why a model that is not served is not: "" where no load of it has failed."""
    rows = [*context.view.catalog.index(), *await context.repository_index(request)]
    reasons = (row.get("reason", "") for row in rows if row["name"] == name)
    return next((reason for reason in reasons if reason not in ("", UNLOADED)), "")


def _sample(served: ServedModel | None) -> dict[str, Any]:
    """The inputs that a request must have, and a small request as JSON; None where it would be large or binary."""
    if served is None:
        return {"inputs": [], "sample": None}
    inputs = declared_inputs(served.config)
    described = [input._asdict() for input in inputs]
    elements = sum(math.prod(size if size > 0 else 1 for size in input.shape) for input in inputs)
    if elements > MAX_SAMPLE_ELEMENTS:
        return {"inputs": described, "sample": None}
    body, binary_from = sample_body(sample_tensors(inputs), is_sequence=served.config.sequence_batching is not None)
    return {"inputs": described, "sample": orjson.loads(body) if binary_from is None else None}

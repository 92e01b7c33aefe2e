"""Statistics of models, over HTTP."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.doors import Doors
from gateway.http.routing import MODEL_PATHS, get, json_answer, named
from gateway.model_statistics import model_statistics


def statistics_routes(doors: Doors) -> list[Route]:
    """Triton's statistics extension. These routes go before those of models: one that is named `stats` is shadowed."""

    async def of_all(_request: Request) -> Response:
        return json_answer(await model_statistics(doors.catalog, doors.statistics, "", ""))

    async def of_model(request: Request) -> Response:
        return json_answer(await model_statistics(doors.catalog, doors.statistics, *named(request)))

    return [get("/v2/models/stats", of_all), *(get(f"{prefix}/stats", of_model) for prefix in MODEL_PATHS)]

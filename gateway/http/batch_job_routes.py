"""Offline jobs over HTTP: they are submitted, listed, watched, paused, cancelled, tried again and forgotten.

Their ids begin with `batch-`, by which these routes are told from those of single requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.doors import Doors
from gateway.http.routing import get, json_answer, post
from gateway.jobs.job_record import ID_PREFIX, MAX_RECORD_BYTES
from schemas.errors import invalid
from schemas.json_text import load_json

_JOB = f"/v2/jobs/{ID_PREFIX}{{rest}}"


def batch_job_routes(doors: Doors) -> list[Route]:
    """The routes of offline jobs; none where there is no service for them."""
    jobs = doors.batch_jobs
    if jobs is None:
        return []

    async def submit(request: Request) -> Response:
        told = await jobs.submit(load_json(await _body(request)))
        headers = {"Location": f"/v2/jobs/{told['id']}"}
        return Response(orjson.dumps(told), 202, headers, "application/json")

    async def list_all(_request: Request) -> Response:
        return json_answer({"jobs": await jobs.list()})

    async def delete(request: Request) -> Response:
        await jobs.delete(ID_PREFIX + request.path_params["rest"])
        return Response(status_code=204)

    def about(ask: Callable[[str], Awaitable[dict[str, Any]]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return json_answer(await ask(ID_PREFIX + request.path_params["rest"]))

        return answer

    return [
        post("/v2/jobs", submit),
        get("/v2/jobs", list_all),
        get(_JOB, about(jobs.status)),
        Route(_JOB, delete, methods=["DELETE"]),
        get(f"{_JOB}/result", about(jobs.result)),
        *(
            post(f"{_JOB}/{verb}", about(ask))
            for verb, ask in (
                ("cancel", jobs.cancel),
                ("pause", jobs.pause),
                ("resume", jobs.resume),
                ("retry", jobs.retry),
            )
        ),
    ]


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_RECORD_BYTES:
            raise invalid(f"a job's description may have {MAX_RECORD_BYTES} bytes")
    return bytes(body)

"""Offline jobs over HTTP: they are submitted, listed, watched, paused, cancelled, tried again and forgotten.

Items may be sent along as JSON Lines (`POST /v2/jobs?model=NAME`, content type application/jsonl); what is sent with a
request is bounded by `--http-max-input-size`. Ids begin with `batch-`, by which these routes are told from those of single
requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gateway.doors import Doors
from gateway.http.routing import get, json_answer, post
from gateway.jobs.job_record import ID_PREFIX, MAX_RECORD_BYTES, NUMBER_FIELDS, JobState
from schemas.errors import invalid
from schemas.json_text import load_json

JSON_LINES = ("application/jsonl", "application/x-ndjson", "application/jsonlines")
"""The content types of items that are sent along."""

FILTERS = ("model", "state")
"""By what `GET /v2/jobs` may choose."""

_JOB = f"/v2/jobs/{ID_PREFIX}{{rest}}"


def batch_job_routes(doors: Doors) -> list[Route]:
    """The routes of offline jobs; none where there is no service for them."""
    jobs = doors.batch_jobs
    if jobs is None:
        return []

    async def submit(request: Request) -> Response:
        if _content_type(request) in JSON_LINES:
            fields: dict[str, Any] = {name: _number(name, text) for name, text in request.query_params.items()}
            told = await jobs.submit_items(await _body(request, doors.limits.input_size), fields)
        else:
            told = await jobs.submit(load_json(await _body(request, MAX_RECORD_BYTES)))
        headers = {"Location": f"/v2/jobs/{told['id']}"}
        return Response(orjson.dumps(told), 202, headers, "application/json")

    async def list_all(request: Request) -> Response:
        wanted = _filters(request)
        told = [job for job in await jobs.list() if all(job[name] == value for name, value in wanted.items())]
        return json_answer({"jobs": told})

    async def result(request: Request) -> Response:
        id = ID_PREFIX + request.path_params["rest"]
        lines = await jobs.result_lines(id)
        if lines is None:
            return json_answer(await jobs.result(id))
        return StreamingResponse(lines, media_type=JSON_LINES[0])

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
        get(f"{_JOB}/result", result),
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


def _filters(request: Request) -> dict[str, str]:
    """What jobs are asked for. Raises WeirError (INVALID_ARG) for a filter, or a state, that there is not."""
    for name, value in request.query_params.items():
        if name not in FILTERS:
            raise invalid(f"unknown filter '{name}' of jobs; there are {', '.join(FILTERS)}")
        if name == "state" and value not in list(JobState):
            raise invalid(f"unknown state '{value}' of a job; there are {', '.join(JobState)}")
    return dict(request.query_params)


async def _body(request: Request, limit_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit_bytes:
            raise invalid(f"a job may be submitted with {limit_bytes} bytes; larger input is to lie in files")
    return bytes(body)


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _number(name: str, text: str) -> str | int:
    """The value of a field in a query, where all is text."""
    if name not in NUMBER_FIELDS:
        return text
    try:
        return int(text)
    except ValueError:
        raise invalid(f"field '{name}' of a job must be an integer") from None

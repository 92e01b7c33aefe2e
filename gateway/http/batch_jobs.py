"""Batch jobs over HTTP: submit, list, watch, pause, resume, cancel, retry and delete.

The body may hold the items as JSON Lines (`POST /v2/jobs?model=NAME`, content type application/jsonl), within
`--http-max-input-size`. Ids begin with `batch-`, which distinguishes these routes from those of asynchronous requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from weir.access.policy.actions import Action
from weir.gateway.context import GatewayContext
from weir.gateway.http.routing import get, json_response, post, read_body
from weir.http_server.door import gate_of, principal_of
from weir.http_server.routing import Handler, Route
from weir.jobs.api.service import ANYBODY, Asker
from weir.jobs.records.record import ID_PREFIX, MAX_RECORD_BYTES, NUMBER_FIELDS, JobEntry, JobState
from weir.schemas.core.errors import invalid
from weir.schemas.kserve.json_documents import load_json

JSON_LINES = ("application/jsonl", "application/x-ndjson", "application/jsonlines")
"""The content types of items in the body."""

FILTERS = ("model", "state")
"""The query parameters by which `GET /v2/jobs` filters."""

_JOB = f"/v2/jobs/{ID_PREFIX}{{rest}}"


def batch_job_routes(context: GatewayContext) -> list[Route]:
    """The routes of batch jobs; none if the gateway has no job service."""
    jobs = context.batch_jobs
    if jobs is None:
        return []

    async def submit(request: Request) -> Response:
        if _content_type(request) in JSON_LINES:
            fields: dict[str, Any] = {name: _number(name, text) for name, text in request.query_params.items()}
            job = await jobs.submit_items(await _body(request, context.limits.input_size), fields, _asker(request))
        else:
            job = await jobs.submit(load_json(await _body(request, MAX_RECORD_BYTES)), _asker(request))
        headers = {"Location": f"/v2/jobs/{job['id']}"}
        return Response(orjson.dumps(job), 202, headers, "application/json")

    async def list_all(request: Request) -> Response:
        filters = _filters(request)
        chosen = [
            job
            for job in await jobs.list(_asker(request))
            if all(job[name] == value for name, value in filters.items())
        ]
        return json_response({"jobs": chosen})

    async def result(request: Request) -> Response:
        id, asker = ID_PREFIX + request.path_params["rest"], _asker(request)
        lines = await jobs.result_lines(id, asker)
        if lines is None:
            return json_response(await jobs.result(id, asker))
        return StreamingResponse(lines, media_type=JSON_LINES[0])

    async def delete(request: Request) -> Response:
        await jobs.delete(ID_PREFIX + request.path_params["rest"], _asker(request))
        return Response(status_code=204)

    def operation(run: Callable[[str, Asker], Awaitable[dict[str, Any]]]) -> Handler:
        async def handle(request: Request) -> Response:
            return json_response(await run(ID_PREFIX + request.path_params["rest"], _asker(request)))

        return handle

    return [
        Route("/v2/jobs", submit, Action.JOBS, methods=["POST"], lists=True, submits=True),
        get("/v2/jobs", list_all, Action.JOBS, lists=True),
        get(_JOB, operation(jobs.status), Action.JOBS, lists=True),
        Route(_JOB, delete, Action.JOBS, methods=["DELETE"], lists=True),
        get(f"{_JOB}/result", result, Action.JOBS, lists=True),
        *(
            post(f"{_JOB}/{verb}", operation(run), Action.JOBS, lists=True)
            for verb, run in (
                ("cancel", jobs.cancel),
                ("pause", jobs.pause),
                ("resume", jobs.resume),
                ("retry", jobs.retry),
            )
        ),
    ]


def _asker(request: Request) -> Asker:
    """Who asks: with an access policy it sees the jobs of its owner; all owners', where it may act for tenants."""
    principal, gate = principal_of(request), gate_of(request)
    if not gate.is_on:
        return ANYBODY
    sees_all = gate.may_act_for_tenants(principal)

    def may_see(entry: JobEntry) -> bool:
        return (sees_all or entry.owner == principal.owner) and gate.may(principal, Action.JOBS, entry.spec.model)

    return Asker(principal.owner, may_see, partial(gate.check, principal, Action.JOBS))


def _filters(request: Request) -> dict[str, str]:
    """The filters in the query. Raises WeirError (INVALID_ARG) for an unknown filter or state."""
    for name, value in request.query_params.items():
        if name not in FILTERS:
            raise invalid(f"unknown filter '{name}' of jobs; expected one of {', '.join(FILTERS)}")
        if name == "state" and value not in list(JobState):
            raise invalid(f"unknown state '{value}' of a job; expected one of {', '.join(JobState)}")
    return dict(request.query_params)


async def _body(request: Request, limit_bytes: int) -> bytes:
    too_long = f"the body of a job exceeds {limit_bytes} bytes; put larger input into files"
    return bytes(await read_body(request, limit_bytes, too_long))


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _number(name: str, text: str) -> str | int:
    """The value of a field in the query, where every value is text."""
    if name not in NUMBER_FIELDS:
        return text
    try:
        return int(text)
    except ValueError:
        raise invalid(f"field '{name}' of a job must be an integer") from None

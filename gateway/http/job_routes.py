"""Requests that are answered later, over HTTP: `Prefer: respond-async` on the infer route, and `/v2/jobs/<id>`.

Ids that begin with `batch-` are those of offline jobs, which another asks for (`gateway.jobs_api`).
Source: RFC 7240 (Prefer), RFC 9110 (202, 409, 410, Retry-After).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gateway.async_requests.async_requests import AsyncRequests
from gateway.async_requests.job_state import JobState
from gateway.async_requests.preferences import Preferences, read_preferences, wants_answer_later
from gateway.async_requests.refusals import StatusError, no_job
from gateway.doors import Doors
from gateway.http.async_infer import RETRY_AFTER_S, accept
from gateway.http.compression import IN_PLACE_BYTES, deflate, response_encoding
from gateway.http.routing import MODEL_PATHS, Handler, error_answer, get, json_answer, post
from gateway.jobs_api import BATCH_PREFIX, BatchJobs, Document
from schemas.json_text import load_json
from schemas.kserve_response import error_body
from schemas.terminal import Outcome

logger = logging.getLogger("weir.gateway")

JOB_PATH = "/v2/jobs/{id}"


def job_routes(doors: Doors) -> list[Route]:
    """The routes; none where the gateway stores no requests."""
    later = doors.later
    if later is None:
        return []
    batch = doors.batch_jobs

    async def infer(request: Request) -> Response:
        if not wants_answer_later(request.headers.raw):
            return error_answer(405, "Method Not Allowed")  # the route is answered ahead of ASGI
        return await accept(doors, later, request)

    async def status(request: Request) -> Response:
        id = request.path_params["id"]
        if batch is not None and id.startswith(BATCH_PREFIX):
            return json_answer(await batch.status(id))
        wait = _preferences(request)
        return _told(await later.jobs.state(id, wait.wait_s or 0.0), wait)

    async def result(request: Request) -> Response:
        id = request.path_params["id"]
        if batch is not None and id.startswith(BATCH_PREFIX):
            return json_answer(await batch.result(id))
        return await _answer(later, await later.jobs.result(id), request)

    async def cancel(request: Request) -> Response:
        id = request.path_params["id"]
        if batch is not None and id.startswith(BATCH_PREFIX):
            return json_answer(await batch.cancel(id))
        return _told(await later.jobs.cancel(id))

    async def delete(request: Request) -> Response:
        id = request.path_params["id"]
        if batch is not None and id.startswith(BATCH_PREFIX):
            await batch.delete(id)
        else:
            await later.jobs.delete(id)
        return Response(status_code=204)

    return [
        *(post(f"{prefix}/infer", _guarded(infer)) for prefix in MODEL_PATHS),
        *([] if batch is None else _batch_routes(batch)),
        get(JOB_PATH, _guarded(status)),
        get(f"{JOB_PATH}/result", _guarded(result)),
        post(f"{JOB_PATH}/cancel", _guarded(cancel)),
        Route(JOB_PATH, _guarded(delete), methods=["DELETE"]),
    ]


def _batch_routes(batch: BatchJobs) -> list[Route]:
    """What only offline jobs have: they are submitted here, listed, paused, resumed, and their failures tried again."""

    def by_id(act: Callable[[str], Awaitable[Document]]) -> Handler:
        async def handle(request: Request) -> Response:
            id = request.path_params["id"]
            if not id.startswith(BATCH_PREFIX):
                raise no_job(id)
            return json_answer(await act(id))

        return _guarded(handle)

    async def submit(request: Request) -> Response:
        document = await batch.submit(await _json(request))
        location = {"Location": f"/v2/jobs/{document['id']}"}
        return Response(orjson.dumps(document), 201, location, "application/json")

    async def jobs(_request: Request) -> Response:
        return json_answer({"jobs": await batch.list()})

    return [
        post("/v2/jobs", _guarded(submit)),
        get("/v2/jobs", _guarded(jobs)),
        *(
            post(f"{JOB_PATH}/{name}", by_id(act))
            for name, act in (("pause", batch.pause), ("resume", batch.resume), ("retry", batch.retry))
        ),
    ]


def _guarded(handler: Handler) -> Handler:
    """The handler whose refusals tell when to come again."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except StatusError as error:
            refusal = error_answer(error.http_status, error.message)
            if error.retry_after_s:
                refusal.headers["Retry-After"] = str(error.retry_after_s)
            return refusal

    return handle


async def _json(request: Request) -> Any:
    return load_json(await request.body())  # its size is bounded where it is received


def _preferences(request: Request) -> Preferences:
    return read_preferences(value for name, value in request.headers.raw if name == b"prefer")


def _told(state: JobState, asked: Preferences | None = None) -> Response:
    answer = json_answer(state.document())
    if asked is not None and asked.wait_s is not None:
        answer.headers["Preference-Applied"] = f"wait={asked.wait_s:.0f}"
    if not state.is_done:
        answer.headers["Retry-After"] = str(RETRY_AFTER_S)
    return answer


async def _answer(later: AsyncRequests, state: JobState, request: Request) -> Response:
    """What the sync route would have answered, as its model's gateway recorded it."""
    assert state.record is not None  # noqa: S101 - it has a result
    assert state.message is not None  # noqa: S101
    told = state.message.headers
    headers = {
        "Weir-Id": state.id,
        "Weir-Outcome": state.status,
        "Weir-Attempts": str(state.record.attempts),
        "Content-Type": told.get("content-type", "application/json"),
    }
    if "inference-header-content-length" in told:
        headers["Inference-Header-Content-Length"] = told["inference-header-content-length"]
    is_answer = state.record.outcome is Outcome.SUCCEEDED
    status = 200 if is_answer else max(400, min(state.record.status, 599))
    found = await later.jobs.answer_object(state)
    if found is not None:
        headers["Content-Length"] = str(found.size_bytes)
        return StreamingResponse(_chunks(found.chunks()), status, headers)
    body = state.message.data or (b"" if is_answer else error_body(state.error))
    encoding = response_encoding(request.headers.get("accept-encoding", "").encode("latin-1")) if is_answer else ""
    if encoding:
        headers["Content-Encoding"] = encoding
        if len(body) <= IN_PLACE_BYTES:
            body = deflate([body], encoding)
        else:
            body = await asyncio.to_thread(deflate, [body], encoding)
    return Response(body, status, headers)


async def _chunks(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            yield chunk
    except (EOFError, TimeoutError) as error:
        # What was sent can't be taken back: the connection ends before the length that was told.
        logger.warning("the result of a job could not be sent to its end: %s", error)
        raise

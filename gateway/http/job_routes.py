"""Requests that are answered later, over HTTP: `Prefer: respond-async` on the infer route, and `/v2/jobs/<id>`.

Ids that begin with `batch-` are those of offline jobs, whose routes stand before these.
Source: RFC 7240 (Prefer), RFC 9110 (202, 409, 410, Retry-After).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from bus.stored_objects import DamagedObject
from gateway.async_requests.async_requests import AsyncRequests
from gateway.async_requests.job_state import JobState
from gateway.async_requests.preferences import Preferences, read_preferences, wants_answer_later
from gateway.async_requests.refusals import StatusError
from gateway.doors import Doors
from gateway.http.async_infer import RETRY_AFTER_S, accept
from gateway.http.compression import IN_PLACE_BYTES, deflate, response_encoding
from gateway.http.routing import MODEL_PATHS, Handler, error_answer, get, json_answer, post, weir_error_answer
from schemas.errors import WeirError
from schemas.kserve_response import error_body
from schemas.terminal import Outcome

logger = logging.getLogger("weir.gateway")

JOB_PATH = "/v2/jobs/{id}"


def job_routes(doors: Doors) -> list[Route]:
    """The routes; none where the gateway stores no requests."""
    later = doors.later
    if later is None:
        return []

    async def infer(request: Request) -> Response:
        if not wants_answer_later(request.headers.raw):
            return error_answer(405, "Method Not Allowed")  # the route is answered ahead of ASGI
        return await accept(doors, later, request)

    async def status(request: Request) -> Response:
        wait = _preferences(request)
        return _told(await later.jobs.state(request.path_params["id"], wait.wait_s or 0.0), wait)

    async def result(request: Request) -> Response:
        return await _answer(later, await later.jobs.result(request.path_params["id"]), request)

    async def cancel(request: Request) -> Response:
        return _told(await later.jobs.cancel(request.path_params["id"]))

    async def delete(request: Request) -> Response:
        await later.jobs.delete(request.path_params["id"])
        return Response(status_code=204)

    return [
        *(post(f"{prefix}/infer", _guarded(infer)) for prefix in MODEL_PATHS),
        get(JOB_PATH, _guarded(status)),
        get(f"{JOB_PATH}/result", _guarded(result)),
        post(f"{JOB_PATH}/cancel", _guarded(cancel)),
        Route(JOB_PATH, _guarded(delete), methods=["DELETE"]),
    ]


def _guarded(handler: Handler) -> Handler:
    """The handler whose refusals tell when to come again."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except WeirError as error:
            answer = weir_error_answer(error)
            if error.retryable and not isinstance(error, StatusError):
                answer.headers.setdefault("Retry-After", str(RETRY_AFTER_S))
            return answer

    return handle


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
    except (EOFError, DamagedObject, ConnectionError, TimeoutError) as error:
        # What was sent can't be taken back: the connection ends before the length that was told.
        logger.warning("the result of a job could not be sent to its end: %s", error)
        raise

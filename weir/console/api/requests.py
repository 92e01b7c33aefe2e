"""Routes of single requests and batches: what is observed now, and the terminal records of durable requests."""

from __future__ import annotations

from typing import Any

from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError
from starlette.requests import Request
from starlette.responses import Response

from weir.access.policy.actions import Action
from weir.bus.naming import durable_subjects
from weir.console.api.context import ConsoleContext
from weir.console.api.observed import batch_page, trace_details, trace_row
from weir.console.api.responses import error_response, json_response, read_integer
from weir.http_server.routing import Route
from weir.schemas.wire.terminal import TerminalRecord

MAX_REQUESTS = 500
"""The most requests that a list has."""

_FOUND = {(True, True): "both", (True, False): "trace", (False, True): "record", (False, False): "none"}


def request_routes(context: ConsoleContext) -> list[Route]:
    """The routes below `/api/requests`."""
    observation = context.observation

    def watch(model: str) -> None:
        # Requests to observe go to all processes: not for any name that a client makes up.
        if not model or context.view.catalog.knows(model):
            observation.watch(model)

    async def listed(request: Request) -> Response:
        model = request.query_params.get("model", "")
        limit = read_integer(request.query_params.get("limit", "50"))
        if limit is None or not 0 < limit <= MAX_REQUESTS:
            return error_response(400, f"limit must be a number from 1 to {MAX_REQUESTS}")
        watch(model)
        return json_response({"requests": [trace_row(trace) for trace in observation.traces(model, limit)]})

    async def shown(request: Request) -> Response:
        id = request.path_params["id"]
        observed = observation.trace(id)
        try:
            record = await find_record(context, id)
        except (NatsError, OSError, TimeoutError) as error:
            return error_response(503, f"the message broker does not answer: {error or type(error).__name__}")
        return json_response(
            {
                "found": _FOUND[observed is not None, record is not None],
                "trace": None if observed is None else trace_details(observed),
                "record": record,
            }
        )

    async def batching(request: Request) -> Response:
        model = request.query_params.get("model", "")
        after = read_integer(request.query_params.get("after", "0"))
        if not model or after is None:
            return error_response(400, "name a model, and in `after` the `next` of the last answer")
        watch(model)
        return json_response(batch_page(observation.batches(model, after), context.view.catalog, model))

    return [
        Route("/api/batching", batching, Action.CONSOLE_READ),
        Route("/api/requests", listed, Action.CONSOLE_READ),
        Route("/api/requests/{id:path}", shown, Action.CONSOLE_READ),
    ]


async def find_record(context: ConsoleContext, id: str) -> dict[str, Any] | None:
    """The terminal record of the durable request of this id, of any model; None if none is kept.

    Raises NatsError, OSError or TimeoutError if the broker does not answer.
    """
    wanted = durable_subjects.any_result(id)
    try:
        async for message in context.bus.jetstream.scan(durable_subjects.RESULT_STREAM, wanted, headers_only=True):
            try:
                record = TerminalRecord.of(message.headers)
            except ValueError:
                continue
            return {
                "id": record.id,
                "model": record.model,
                "version": record.version,
                "outcome": record.outcome.value,
                "attempts": record.attempts,
                "accepted_ms": record.accepted_ms,
                "ended_ms": record.ended_ms,
                "status": record.status,
                "tenant": record.tenant,
                "history": [{"ended_ms": attempt.ended_ms, "reason": attempt.reason} for attempt in record.history],
            }
    except NotFoundError:
        pass
    return None

"""Routes of single requests: the terminal record of a durable request by its id."""

from __future__ import annotations

from typing import Any

from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bus.naming import durable_subjects
from console.api.context import ConsoleContext
from console.api.responses import error_response, json_response
from schemas.wire.terminal import TerminalRecord


def request_routes(context: ConsoleContext) -> list[Route]:
    """The routes below `/api/requests`."""

    async def shown(request: Request) -> Response:
        id = request.path_params["id"]
        try:
            record = await find_record(context, id)
        except (NatsError, OSError, TimeoutError) as error:
            return error_response(503, f"the message broker does not answer: {error or type(error).__name__}")
        return json_response({"found": "record" if record else "none", "trace": None, "record": record})

    return [Route("/api/requests/{id}", shown)]


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

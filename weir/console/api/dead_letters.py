"""Routes of dead letters: list, preview, replay and purge them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from nats.errors import Error as NatsError
from starlette.requests import Request
from starlette.responses import Response

from weir.access.policy.actions import Action
from weir.bus.streams.dead_letters import DeadLetter, no_letter
from weir.console.api.acting import guarded
from weir.console.api.context import ConsoleContext
from weir.console.api.responses import error_response, json_response, read_integer
from weir.http_server.door import allows
from weir.http_server.routing import Route
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.names import model_identity

MAX_LETTERS = 500
"""The most letters that a list has, and that one request replays."""

PREVIEW_BYTES = 4096
"""The part of a letter's body that is shown."""

_Handler = Callable[[Request], Awaitable[Response]]


def dead_letter_routes(context: ConsoleContext) -> list[Route]:
    """The routes below `/api/dead`."""
    routes = _DeadLetterRoutes(context)

    def changing(handler: _Handler) -> _Handler:
        return guarded(_reporting(handler), context.allows_changes)

    dead = Action.DEAD_LETTERS
    return [
        Route("/api/dead", _reporting(routes.listed), dead, lists=True),
        Route("/api/dead/replay", changing(routes.replay_all), dead, methods=["POST"], lists=True),
        Route("/api/dead/purge", changing(routes.purge_all), dead, methods=["POST"]),
        Route("/api/dead/{sequence:int}", _reporting(routes.shown), dead, lists=True),
        Route("/api/dead/{sequence:int}/replay", changing(routes.replay), dead, methods=["POST"], lists=True),
        Route("/api/dead/{sequence:int}", changing(routes.remove), dead, methods=["DELETE"], lists=True),
    ]


class _DeadLetterRoutes:
    """The handlers. They raise what `DeadLetters` raises."""

    def __init__(self, context: ConsoleContext) -> None:
        self._view = context.view
        self._dead = context.dead_letters

    async def listed(self, request: Request) -> Response:
        """The newest letters, of one model if the query names it."""
        limit = read_integer(request.query_params.get("limit", "100"))
        if limit is None or not 0 < limit <= MAX_LETTERS:
            return error_response(400, f"limit must be a number from 1 to {MAX_LETTERS}")
        model = request.query_params.get("model", "")
        letters = [letter for letter in await self._dead.newest(limit, model) if allows(request, letter.model)]
        counted = (await self._view.status()).dead
        shown = [row for row in counted if model in ("", model_identity(row.model, row.namespace))]
        total = sum(row.letters for row in shown if allows(request, row.model))
        return json_response({"total": total, "letters": [_row(letter) for letter in letters]})

    async def shown(self, request: Request) -> Response:
        """One letter with its headers and the first part of its body."""
        return json_response(_details(await self._letter(request)))

    async def replay(self, request: Request) -> Response:
        """Publishes one letter again."""
        letter = await self._letter(request)
        return json_response({"replayed": 1, "id": await self._dead.replay(letter)})

    async def remove(self, request: Request) -> Response:
        """Deletes one letter."""
        await self._dead.purge(await self._letter(request))
        return json_response({"purged": 1})

    async def _letter(self, request: Request) -> DeadLetter:
        """The letter that the path names. Raises WeirError, also for one of a model that the sender may not know of."""
        sequence = request.path_params["sequence"]
        letter = await self._dead.get(sequence)
        if not allows(request, letter.model):
            raise no_letter(sequence)
        return letter

    async def replay_all(self, request: Request) -> Response:
        """Publishes the newest letters again, oldest first, and lists those that could not be."""
        newest = await self._dead.newest(MAX_LETTERS, request.query_params.get("model", ""))
        letters = [letter for letter in newest if allows(request, letter.model)]
        kept: list[dict[str, Any]] = []
        for letter in reversed(letters):
            try:
                await self._dead.replay(await self._dead.get(letter.sequence))
            except WeirError as error:
                kept.append({"seq": letter.sequence, "id": letter.id, "error": error.message})
        return json_response({"replayed": len(letters) - len(kept), "kept": kept})

    async def purge_all(self, request: Request) -> Response:
        """Deletes all letters, of one model if the query names it."""
        model = request.query_params.get("model", "")
        letters = [letter async for letter in self._dead.headers(model=model)]
        if letters:
            await self._dead.purge_up_to(letters[-1].sequence, model)
        return json_response({"purged": len(letters)})


def _reporting(handler: _Handler) -> _Handler:
    """`handler`, whose expected errors are answered: 404 for a letter that is not there, 409 where it can't be done."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except WeirError as error:
            return error_response(404 if error.code is ErrorCode.NOT_FOUND else 409, error.message)
        except (NatsError, OSError, TimeoutError) as error:
            return error_response(503, f"the message broker does not answer: {error or type(error).__name__}")

    return handle


def _row(letter: DeadLetter) -> dict[str, Any]:
    return {
        "seq": letter.sequence,
        "id": letter.id,
        "model": letter.model,
        "reason": letter.reason,
        "at_ms": letter.dead_ms,
        "attempts": letter.attempts,
        "size_bytes": letter.size_bytes,
    }


def _details(letter: DeadLetter) -> dict[str, Any]:
    preview = letter.body[:PREVIEW_BYTES]
    try:
        shown = {"text": preview.decode()}
    except UnicodeDecodeError as error:
        # A character may be cut by the end of the preview.
        is_cut = error.start > len(preview) - 4 and len(letter.body) > PREVIEW_BYTES
        shown = {"text": preview[: error.start].decode()} if is_cut else {"hex": preview.hex(" ")}
    return {
        **_row(letter),
        "subject": letter.subject,
        "object": letter.object or None,
        "history": [{"ended_ms": attempt.ended_ms, "reason": attempt.reason} for attempt in letter.history],
        "headers": [
            (name, "***" if name.lower() == "authorization" else value) for name, value in letter.original_headers()
        ],
        "preview": shown,
        "is_complete": len(letter.body) <= PREVIEW_BYTES and not letter.is_truncated,
    }

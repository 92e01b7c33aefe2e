"""Handlers of gRPC methods, and helpers to make them from functions and coroutine functions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from weir.access.policy.actions import Action
from weir.access.principal import Principal
from weir.gateway.grpc.call import UnaryCall
from weir.gateway.grpc.codec import parse_message, read_version
from weir.gateway.grpc.messages import Message
from weir.gateway.grpc.status import call_error
from weir.gateway.grpc.stream_call import StreamCall, StreamHandler

Handler = Callable[[UnaryCall, Message], None]
"""Handles one call with this request message. Raises WeirError to fail the call."""


@dataclass(frozen=True, slots=True)
class Unary:
    """A method with one request and one response; its calls do `action`."""

    handle: Handler
    action: Action


@dataclass(frozen=True, slots=True)
class Streaming:
    """A streaming method: `make_handler` makes the handler of one call. It raises WeirError to reject the call."""

    make_handler: Callable[[StreamCall], StreamHandler]
    action: Action


Methods = dict[str, Unary | Streaming]
"""Methods by their name in their service."""


class Rows(NamedTuple):
    """The repeated field of a response whose rows are about models, of which a caller sees those that it may see."""

    field: str

    def keep(self, message: Any, may_see: Callable[[str], bool]) -> None:
        """Removes the other rows."""
        rows = getattr(message, self.field)
        kept = [row for row in rows if may_see(row.name)]
        if len(kept) < len(rows):
            del rows[:]
            rows.extend(kept)


def unary(
    request_type: Any, respond: Callable[[Any], Any], action: Action, model_field: str = "", *, lists: bool = False
) -> Unary:
    """A method for which `respond` turns the request message into the response message.

    `model_field` is the field of the request with the name of the model, "" where it concerns the server. With `lists`,
    whoever may do the action to any model may call it.
    """

    def handle(call: UnaryCall, data: Message) -> None:
        request = parse_message(request_type, data)
        if lists:
            call.admit_any()
        else:
            _admit(call, request, model_field, None)
        call.send(respond(request).SerializeToString(), is_last=True)

    return Unary(handle, action)


def unary_of(request_type: Any, respond: Callable[[Any, Principal], Awaitable[Any]], action: Action) -> Unary:
    """As `unary_async`, for what concerns the server; `respond` gets the principal, too."""

    def handle(call: UnaryCall, data: Message) -> None:
        request = parse_message(request_type, data)
        _admit(call, request, "", None)
        call.keeps_received = True
        task = asyncio.get_running_loop().create_task(_respond(call, respond(request, call.principal), None))
        call.on_cancel = lambda: _cancel(task)

    return Unary(handle, action)


def unary_async(
    request_type: Any,
    respond: Callable[[Any], Awaitable[Any]],
    action: Action,
    model_field: str = "",
    rows: Rows | None = None,
) -> Unary:
    """As `unary` for a coroutine function, which is cancelled when the client cancels the call.

    With `rows`, the response lists models where the request names none.
    """

    def handle(call: UnaryCall, data: Message) -> None:
        request = parse_message(request_type, data)
        _admit(call, request, model_field, rows)
        call.keeps_received = True
        task = asyncio.get_running_loop().create_task(_respond(call, respond(request), rows))
        call.on_cancel = lambda: _cancel(task)

    return Unary(handle, action)


def _admit(call: UnaryCall, request: Any, model_field: str, rows: Rows | None) -> None:
    """Asks the gate about the model that the request names. Raises WeirError."""
    if call.gate is None:
        return
    model = getattr(request, model_field) if model_field else ""
    if model or rows is None:
        call.admit(model, read_version(getattr(request, "version", "")))
    else:
        call.admit_any()


async def _respond(call: UnaryCall, answering: Awaitable[Any], rows: Rows | None) -> None:
    try:
        message = await answering
        if rows is not None:
            rows.keep(message, call.may_see)
    except Exception as error:  # noqa: BLE001 - those without a status are reported
        call.on_cancel = None
        call.fail(call_error(error, "weir.gateway.grpc.handlers: handling a call"))
    else:
        call.send(message.SerializeToString(), is_last=True)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()

"""Handlers of gRPC methods, and helpers to make them from functions and coroutine functions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from weir.gateway.grpc.call import UnaryCall
from weir.gateway.grpc.codec import parse_message
from weir.gateway.grpc.messages import Message
from weir.gateway.grpc.status import call_error
from weir.gateway.grpc.stream_call import StreamCall, StreamHandler

Handler = Callable[[UnaryCall, Message], None]
"""Handles one call with this request message. Raises WeirError to fail the call."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """A streaming method: `make_handler` makes the handler of one call. It raises WeirError to reject the call."""

    make_handler: Callable[[StreamCall], StreamHandler]


Methods = dict[str, Handler | Streaming]
"""Handlers by the name of the method in its service."""


def unary(request_type: Any, respond: Callable[[Any], Any]) -> Handler:
    """The handler of a method for which `respond` turns the request message into the response message."""

    def handle(call: UnaryCall, data: Message) -> None:
        call.send(respond(parse_message(request_type, data)).SerializeToString(), is_last=True)

    return handle


def unary_async(request_type: Any, respond: Callable[[Any], Awaitable[Any]]) -> Handler:
    """As `unary` for a coroutine function, which is cancelled when the client cancels the call."""

    def handle(call: UnaryCall, data: Message) -> None:
        call.keeps_received = True
        task = asyncio.get_running_loop().create_task(_respond(call, respond(parse_message(request_type, data))))
        call.on_cancel = lambda: _cancel(task)

    return handle


async def _respond(call: UnaryCall, answering: Awaitable[Any]) -> None:
    try:
        message = await answering
    except Exception as error:  # noqa: BLE001 - those without a status are reported
        call.on_cancel = None
        call.fail(call_error(error, "weir.gateway.grpc.handlers: handling a call"))
    else:
        call.send(message.SerializeToString(), is_last=True)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()

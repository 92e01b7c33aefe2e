"""What a gRPC method is to the server: a handler of calls. Each room of methods makes a dictionary of them by name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from gateway.grpc.call import UnaryCall
from gateway.grpc.codec import parse_message
from gateway.grpc.messages import Message
from gateway.grpc.status import CallError, Status
from gateway.grpc.stream_call import Conversation, StreamCall
from runtime.containment import report
from schemas.errors import WeirError

Handler = Callable[[UnaryCall, Message], None]
"""Serves one call whose request is this message. Raises WeirError for what is refused."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """A method with any number of messages each way: `converse` begins the conversation of a call.

    It raises WeirError for a call that is refused.
    """

    converse: Callable[[StreamCall], Conversation]


Methods = dict[str, Handler | Streaming]
"""What serves each method, by its name in its service."""


def unary(request_type: Any, answer: Callable[[Any], Any]) -> Handler:
    """The handler of a method whose `answer` is a function from request message to response message."""

    def handle(call: UnaryCall, data: Message) -> None:
        call.send(answer(parse_message(request_type, data)).SerializeToString(), is_last=True)

    return handle


def unary_async(request_type: Any, answer: Callable[[Any], Awaitable[Any]]) -> Handler:
    """As `unary`, for an `answer` that takes its time; it is cancelled when its caller gives up."""

    def handle(call: UnaryCall, data: Message) -> None:
        call.keeps_received = True
        task = asyncio.get_running_loop().create_task(_answer(call, answer(parse_message(request_type, data))))
        call.on_cancel = lambda: _cancel(task)

    return handle


async def _answer(call: UnaryCall, answering: Awaitable[Any]) -> None:
    try:
        message = await answering
    except WeirError as error:
        call.on_cancel = None
        call.fail(CallError.of(error))
    except Exception as error:  # noqa: BLE001 - reported; the client gets no internals
        report("gateway.grpc.rpc: handling a call", error)
        call.on_cancel = None
        call.fail(CallError(Status.INTERNAL, "internal server error"))
    else:
        call.send(message.SerializeToString(), is_last=True)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()

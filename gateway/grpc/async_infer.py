"""`AsyncInferHandler`: `ModelInfer` with the metadata `prefer: respond-async` (or `weir-prefer`).

The request is answered when it is stored. The response has no outputs, but the parameters `job_id` and `job_status`;
clients query the state and the result over HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from weir.calls.catalog import Catalog
from weir.durable.api.acceptance import BROKER_ERRORS, AcceptedRequest
from weir.durable.api.async_requests import AsyncRequests
from weir.durable.api.errors import broker_unavailable, reject_region
from weir.durable.api.options import AsyncRequestOptions
from weir.gateway.access import add_parameters
from weir.gateway.context import GatewayContext
from weir.gateway.grpc.call import UnaryCall
from weir.gateway.grpc.codec import (
    SplitMessage,
    decode_split,
    read_version,
    request_from_message,
    split_request,
    write_parameters,
)
from weir.gateway.grpc.messages import Message
from weir.gateway.grpc.offload import READ_REQUEST, is_long, offload_parts, offloaded_message
from weir.gateway.grpc.status import call_error
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.kserve.request import build_infer_request
from weir.schemas.kserve.triton_messages import messages


class AsyncInferHandler:
    """Stores asynchronous requests. An instance is the handler of their calls."""

    def __init__(self, context: GatewayContext, async_requests: AsyncRequests) -> None:
        self._catalog: Catalog = context.catalog
        self._async_requests = async_requests
        self._offload = context.offload

    def __call__(self, call: UnaryCall, data: Message) -> None:
        """Checks the request as if it ran now, and stores it. Raises WeirError if it is rejected."""
        split = split_request(data)
        if is_long(split):
            task = asyncio.get_running_loop().create_task(self._read(call, split))
            call.on_cancel = lambda: _cancel(task)
            return
        self._begin(call, *decode_split(split))

    async def _read(self, call: UnaryCall, split: SplitMessage) -> None:
        """Has a helper process parse a long message first."""
        try:
            parts = await self._offload.run(READ_REQUEST, offload_parts(split))
            self._begin(call, *offloaded_message(split, parts))
        except Exception as error:  # noqa: BLE001 - those without a status are reported
            _fail(call, error)

    def _begin(self, call: UnaryCall, message: Any, raw_contents: Sequence[bytes | memoryview]) -> None:
        version = read_version(message.model_version)
        served = self._catalog.resolve(message.model_name, version)
        if served.config.is_decoupled:
            raise WeirError(
                ErrorCode.UNSUPPORTED, "ModelInfer RPC doesn't support models with decoupled transaction policy"
            )
        headers = call.head.async_headers or ()
        options = AsyncRequestOptions.of(headers, self._async_requests.rules, served.sticky_header)
        request = request_from_message(message, raw_contents, find_region=reject_region)
        if call.head.forwarded:
            request.parameters = add_parameters(request.parameters, call.head.forwarded)
        chunks, header_length = build_infer_request(request)
        options.read_into(request)
        served.normalizer.normalize(request)
        body = b"".join(chunks)
        accepting = self._async_requests.acceptance.accept(served, version, str(header_length), body, options)
        task = asyncio.get_running_loop().create_task(self._respond(call, version, request.id, accepting))
        call.on_cancel = lambda: _cancel(task)

    async def _respond(self, call: UnaryCall, version: str, id: str, accepting: Awaitable[AcceptedRequest]) -> None:
        try:
            accepted = await accepting
        except BROKER_ERRORS:
            _fail(call, broker_unavailable())
            return
        except Exception as error:  # noqa: BLE001 - those without a status are reported
            _fail(call, error)
            return
        response = messages.ModelInferResponse(model_name=accepted.model, model_version=version, id=id)
        write_parameters({"job_id": accepted.id, "job_status": accepted.outcome or "queued"}, response.parameters)
        call.send(response.SerializeToString(), is_last=True)


def _fail(call: UnaryCall, error: Exception) -> None:
    call.on_cancel = None
    call.fail(call_error(error, "weir.gateway.grpc.async_infer: answering a call"))


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()

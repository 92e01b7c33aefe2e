"""`AsyncInferHandler`: `ModelInfer` with the metadata `prefer: respond-async` (or `weir-prefer`).

The request is answered when it is stored. The response has no outputs, but the parameters `job_id` and `job_status`;
clients query the state and the result over HTTP.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from weir.access.limits.refusals import TokensPending
from weir.bus.nats.connection import BROKER_ERRORS
from weir.calls.catalog import Catalog
from weir.calls.inference.call import read_request
from weir.durable.api.async_requests import AsyncRequests
from weir.durable.api.errors import broker_unavailable, reject_region
from weir.durable.api.options import AsyncRequestOptions
from weir.gateway.access import add_parameters
from weir.gateway.context import GatewayContext
from weir.gateway.grpc.call import UnaryCall
from weir.gateway.grpc.codec import write_parameters
from weir.gateway.grpc.infer import UNARY, RequestMessage
from weir.gateway.grpc.messages import Message
from weir.gateway.grpc.status import call_error
from weir.schemas.core.request_limits import RequestLimits
from weir.schemas.kserve.regions import FindRegion
from weir.schemas.kserve.request import build_infer_request
from weir.schemas.kserve.triton_messages import messages


class _StoredRead(NamedTuple):
    """How a request is read that is stored: no region of a client is there when it runs."""

    catalog: Catalog
    limits: RequestLimits
    find_region: FindRegion


class AsyncInferHandler:
    """Stores asynchronous requests. An instance is the handler of their calls."""

    def __init__(self, context: GatewayContext, async_requests: AsyncRequests) -> None:
        self._async_requests = async_requests
        self._offload = context.offload
        self._read_context = _StoredRead(context.catalog, context.limits, reject_region)

    def __call__(self, call: UnaryCall, data: Message) -> None:
        """Checks the request as if it ran now, and stores it. Raises WeirError for what is no message."""
        call.keeps_received = True
        task = asyncio.get_running_loop().create_task(self._store(call, RequestMessage(data, call)))
        call.on_cancel = lambda: _cancel(task)

    async def _store(self, call: UnaryCall, source: RequestMessage) -> None:
        try:
            response = await self._stored(call, source)
        except BROKER_ERRORS:
            _fail(call, broker_unavailable())
        except Exception as error:  # noqa: BLE001 - those without a status are reported
            _fail(call, error)
        else:
            call.send(response, is_last=True)

    async def _stored(self, call: UnaryCall, source: RequestMessage) -> bytes:
        head = call.head
        try:
            served, request = await read_request(UNARY, source, self._read_context, self._offload)
        except TokensPending as pending:
            refusal = await pending.wait()
            if refusal is not None:
                raise refusal from None
            source.is_counted = True
            served, request = await read_request(UNARY, source, self._read_context, self._offload)
        principal = None if call.gate is None else call.principal
        rules = self._async_requests.rules
        options = AsyncRequestOptions.of(head.async_headers or (), rules, served.sticky_header, principal)
        if call.gate is not None:
            options.limit_results(call.gate, call.principal)
        if head.forwarded:
            request.parameters = add_parameters(request.parameters, head.forwarded)
        chunks, header_length = build_infer_request(request)
        options.read_into(request)
        served.normalizer.normalize(request)
        version, body = request.model_version, b"".join(chunks)
        accepted = await self._async_requests.acceptance.accept(served, version, str(header_length), body, options)
        response = messages.ModelInferResponse(model_name=accepted.model, model_version=version, id=request.id)
        write_parameters({"job_id": accepted.id, "job_status": accepted.outcome or "queued"}, response.parameters)
        return bytes(response.SerializeToString())


def _fail(call: UnaryCall, error: Exception) -> None:
    call.on_cancel = None
    call.fail(call_error(error, "weir.gateway.grpc.async_infer: answering a call"))


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()

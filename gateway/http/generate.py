"""The generate extension over HTTP: one JSON object, or a stream of server-sent events.

Source: Triton's generate extension.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from weir.access.policy.actions import Action
from weir.calls.catalog import ServedModel
from weir.calls.inference.documents import Document, ReadContext
from weir.gateway.context import GatewayContext
from weir.gateway.http.events import EventCall, EventResponse
from weir.gateway.http.routing import MODEL_PATHS, model_and_version, post
from weir.http_server.routing import Route
from weir.runtime.offload import takes_long
from weir.schemas.core.errors import invalid
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.kserve.generate import build_generate_response, parse_generate_request
from weir.schemas.kserve.offloaded import Job, generate_job, generate_response_job, outlined_request


class GenerateCodec:
    """Reads a `Document` for the generate extension; writes the JSON object of a response."""

    def read_job(self, source: Document, context: ReadContext) -> Job | None:
        """Implements `Codec.read_job`."""
        if not takes_long(source.data):
            return None
        return generate_job(source.model, source.version, source.data, source.served.config, context.limits)

    def read(
        self, source: Document, parts: Sequence[memoryview], context: ReadContext
    ) -> tuple[ServedModel, InferRequest]:
        """Implements `Codec.read`."""
        served, model, version, body, _ = source
        if parts:
            return served, outlined_request(model, version, parts)
        return served, parse_generate_request(model, version, bytes(body), served.config, context.limits)

    def write_job(self, served: ServedModel, request: InferRequest, response: InferResponse) -> Job | None:
        """Implements `Codec.write_job`."""
        return generate_response_job(response)

    def write(
        self, served: ServedModel, request: InferRequest, response: InferResponse, parts: Sequence[memoryview]
    ) -> bytes:
        """Implements `Codec.write`."""
        return bytes(parts[0]) if parts else build_generate_response(response)


_CODEC = GenerateCodec()


def generate_routes(context: GatewayContext) -> list[Route]:
    """The routes `generate` and `generate_stream`, of a model and of a version."""

    async def generate(is_stream: bool, request: Request) -> Response:
        name, version = model_and_version(request)
        served = context.catalog.resolve(name, version)
        if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise invalid("Unsupported content-encoding, only 'identity' is supported.")
        call = EventCall(context, _CODEC, request, Document(served, name, version, await request.body()))
        await call.opened()
        return EventResponse(call, is_stream)

    return [
        post(f"{prefix}/{name}", partial(generate, is_stream), Action.INFER)
        for prefix in MODEL_PATHS
        for name, is_stream in (("generate", False), ("generate_stream", True))
    ]

"""`LaterCalls`: `ModelInfer` with the metadata `prefer: respond-async` (or `weir-prefer`), answered once it is stored.

The response has no outputs, but the parameters `job_id` and `job_status`. The job itself is asked for over HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tritonclient.grpc import service_pb2

from calls.catalog import Catalog, ServedModel
from gateway.access import add_parameters
from gateway.async_requests.async_requests import AsyncRequests
from gateway.async_requests.queue_depths import UNREACHABLE
from gateway.async_requests.refusals import no_broker
from gateway.async_requests.regions import no_region
from gateway.async_requests.request_headers import AskedLater
from gateway.doors import Doors
from gateway.grpc.call import UnaryCall
from gateway.grpc.codec import Split, decode_split, request_from_message, split_request
from gateway.grpc.messages import Message
from gateway.grpc.offloaded import READ_REQUEST, is_long, read_result, request_job
from gateway.grpc.parameters import write_parameters
from gateway.grpc.status import CallError, Status
from gateway.grpc.versions import read_version
from runtime.containment import report
from schemas.errors import ErrorCode, WeirError
from schemas.kserve_request_text import build_infer_request


class LaterCalls:
    """See the module."""

    def __init__(self, doors: Doors, later: AsyncRequests) -> None:
        self._catalog: Catalog = doors.catalog
        self._later = later
        self._offload = doors.offload

    def __call__(self, call: UnaryCall, data: Message) -> None:
        """Checks the request as if it were run now, and has it stored. Raises WeirError for what is refused."""
        split = split_request(data)
        if is_long(split):
            task = asyncio.get_running_loop().create_task(self._read(call, split))
            call.on_cancel = lambda: _cancel(task)
            return
        self._begin(call, *decode_split(split))

    async def _read(self, call: UnaryCall, split: Split) -> None:
        """Has a helper process read a long message first."""
        try:
            parts = await self._offload.run(READ_REQUEST, request_job(split))
            self._begin(call, *read_result(split, parts))
        except WeirError as error:
            call.on_cancel = None
            call.fail(CallError.of(error))
        except Exception as error:  # noqa: BLE001 - reported; the client gets no internals
            report("gateway.grpc.later_calls: answering a call", error)
            call.on_cancel = None
            call.fail(CallError(Status.INTERNAL, "internal server error"))

    def _begin(self, call: UnaryCall, message: Any, raw_contents: Sequence[bytes | memoryview]) -> None:
        version = read_version(message.model_version)
        served = self._catalog.resolve(message.model_name, version)
        if served.config.is_decoupled:
            raise WeirError(
                ErrorCode.UNSUPPORTED, "ModelInfer RPC doesn't support models with decoupled transaction policy"
            )
        asked = AskedLater.of(call.head.later or (), self._later.rules)
        request = request_from_message(message, raw_contents, find_region=no_region)
        if call.head.forwarded:
            request.parameters = add_parameters(request.parameters, call.head.forwarded)
        chunks, header_length = build_infer_request(request)
        asked.read_into(request)
        served.normalizer.normalize(request)
        work = self._accept(call, served, version, request.id, str(header_length), b"".join(chunks), asked)
        task = asyncio.get_running_loop().create_task(work)
        call.on_cancel = lambda: _cancel(task)

    async def _accept(
        self,
        call: UnaryCall,
        served: ServedModel,
        version: str,
        id: str,
        header_length: str,
        body: bytes,
        asked: AskedLater,
    ) -> None:
        try:
            accepted = await self._later.acceptance.accept(served, version, header_length, body, asked)
        except WeirError as error:
            call.on_cancel = None
            call.fail(CallError.of(error))
            return
        except UNREACHABLE:
            call.on_cancel = None
            call.fail(CallError.of(no_broker()))
            return
        except Exception as error:  # noqa: BLE001 - reported; the client gets no internals
            report("gateway.grpc.later_calls: answering a call", error)
            call.on_cancel = None
            call.fail(CallError(Status.INTERNAL, "internal server error"))
            return
        told = service_pb2.ModelInferResponse(model_name=accepted.model, model_version=version, id=id)
        write_parameters({"job_id": accepted.id, "job_status": accepted.outcome or "queued"}, told.parameters)
        call.send(told.SerializeToString(), is_last=True)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()

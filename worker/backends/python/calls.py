"""`ProcessCallServer`: serves what Python models ask of their worker: inference by other models, and model control.

A model's process may have any number of calls open, from its threads and coroutines, during `execute` and after it. Each
process has a connection of its own, which the worker's event loop reads and writes. A model may therefore call a model of
the same worker while its own instance's thread waits in `execute`. Requests take the same path as those of clients, through
the queue of the called model (`weir.worker.backend_api.inference_client`). The calls of a process are cancelled when it
ends.

Error texts are those of Triton's Python backend ("BLS").
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, cast

import msgpack

from weir.calls.catalog import Catalog
from weir.calls.in_flight import PendingRequest
from weir.calls.model_control import ModelControl
from weir.runtime.containment import call_each, contained, report
from weir.schemas.core import request_limits
from weir.schemas.core.errors import ErrorCode, WeirError, internal, unavailable
from weir.schemas.core.requests import InferRequest, InferResponse, RequestedOutput
from weir.schemas.core.tensors import DATATYPES, PayloadRef, Tensor
from weir.telemetry.tracing.context import context_of
from weir.worker.backend_api.custom_metrics import LoadMetrics, ModelMetrics
from weir.worker.backend_api.inference_client import InferenceClient
from weir.worker.python_stub._weir_channel import LENGTH, Kind
from weir.worker.python_stub._weir_memory import MemoryReader

logger = logging.getLogger("weir.worker")

MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""Responses that a process has not read yet; a call of a decoupled model that exceeds this is cancelled."""

_RELEASING = "weir.worker.backends.python.calls: releasing an output that a process has read"

_LATEST = -1
_SEQUENCE_FLAGS = 3


class ProcessCallServer:
    """Accepts the connections of all processes of a worker (`weir.worker.backend_api.interface.ProcessCalls`).

    Created in the worker's event loop.
    """

    def __init__(
        self, client: InferenceClient, model_control: ModelControl, metrics: ModelMetrics | None = None
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.client = client
        self.model_control = model_control
        self.metrics = metrics or ModelMetrics()
        self.open_calls: Counter[str] = Counter()
        """Requests without a final response, by the keys of the instances that sent them; no entry stands for none."""
        self.on_first_call: Callable[[str], None] = lambda key: None
        """Called in the event loop with the key of an instance that sends a request while it has none open."""
        self._connecting: set[asyncio.Task[Any]] = set()

    def connect(
        self, end: socket.socket, memory_fd: int, name: str, metrics: LoadMetrics | None = None, key: str = ""
    ) -> ProcessConnection:
        """Implements `ProcessCalls.connect`."""
        metrics = metrics or self.metrics.of_load(name, 0)
        connection = ProcessConnection(self, memory_fd, name, metrics, key or name)
        self.loop.call_soon_threadsafe(self._open, connection, end)
        return connection

    def has_open_calls(self, key: str) -> bool:
        """Implements `ProcessCalls.has_open_calls`."""
        return self.open_calls[key] > 0

    def _open(self, connection: ProcessConnection, end: socket.socket) -> None:
        end.setblocking(False)
        connecting = self.loop.create_task(self._connect(connection, end))
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: ProcessConnection, end: socket.socket) -> None:
        try:
            await self.loop.create_unix_connection(lambda: connection, sock=end)
            return
        except OSError:
            pass  # the process has ended
        except Exception as error:  # noqa: BLE001 - reported; the calls of the process fail instead of waiting
            report("weir.worker.backends.python.calls: connecting the calls of a process", error)
        end.close()
        connection.connection_lost(None)


class ProcessConnection(asyncio.Protocol):
    """The calls of one process. Everything runs in the event loop, except `close`, which any thread may call."""

    def __init__(self, server: ProcessCallServer, memory_fd: int, name: str, metrics: LoadMetrics, key: str) -> None:
        self._key = key
        self._metrics = metrics.process()
        self._server = server
        self._client = server.client
        self._loop = server.loop
        self._memory_fd = memory_fd
        self._memory = MemoryReader(memory_fd)
        self._name = name
        self._buffer = bytearray()
        self._pending: dict[int, PendingRequest] = {}
        self._lent: dict[tuple[str, int, int], PayloadRef] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._transport: asyncio.Transport | None = None
        self._is_closed = False
        self._unreachable: WeirError | None = None
        self._handlers: dict[int | None, Callable[..., None]] = {
            Kind.CALL: self._call,
            Kind.RELEASE: self._release_outputs,
            Kind.CANCEL_CALL: self._cancel_call,
            Kind.LOAD: self._load,
            Kind.UNLOAD: self._unload,
            Kind.IS_MODEL_READY: self._check_readiness,
            Kind.METRIC_FAMILY: partial(self._define_metric, self._metrics.family),
            Kind.METRIC: partial(self._define_metric, self._metrics.metric),
            Kind.METRIC_FAMILIES_DELETED: self._metrics.gone,
        }

    def close(self) -> None:
        """Implements `CallConnection.close`."""
        try:
            self._loop.call_soon_threadsafe(self._close)
        except RuntimeError:
            pass  # the worker itself has ended

    def _close(self) -> None:
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Implements `asyncio.Protocol.connection_made`."""
        self._transport = cast(asyncio.Transport, transport)
        if self._is_closed:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the open requests of the process; model control operations continue."""
        self._is_closed = True
        self._transport = None
        for number in list(self._pending):
            self._cancel(number)
        call_each(_RELEASING, [partial(self._client.release, ref) for ref in self._lent.values()])
        self._lent.clear()
        self._metrics.close()
        os.close(self._memory_fd)

    def data_received(self, data: bytes) -> None:
        """Implements `asyncio.Protocol.data_received`."""
        self._buffer += data
        if self._client.is_open:
            self._handle_buffered()
        elif self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()
            self._start(self._open_client())

    async def _open_client(self) -> None:
        try:
            await self._client.open()
            self._unreachable = None
        except WeirError as error:
            self._unreachable = error  # the error of the calls that have arrived; the next call tries again
        except Exception as error:  # noqa: BLE001 - reported; the process must get a response in any case
            report("weir.worker.backends.python.calls: opening the calls of a process", error)
            self._unreachable = _internal_error(error)
        self._handle_buffered()
        if self._transport is not None and not self._is_closed:
            self._transport.resume_reading()

    def _handle_buffered(self) -> None:
        buffer, start = self._buffer, 0
        while not self._is_closed and len(buffer) >= start + LENGTH.size:
            (length,) = LENGTH.unpack_from(buffer, start)
            end = start + LENGTH.size + length
            if len(buffer) < end:
                break
            with memoryview(buffer) as whole, whole[start + LENGTH.size : end] as message:
                try:
                    kind, *arguments = msgpack.unpackb(message, use_list=False)
                except (ValueError, TypeError, msgpack.UnpackException):
                    kind, arguments = None, []
            start = end
            try:
                self._handlers[kind](*arguments)
            except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
                # Weir's own code in the process does not send this, so its state is unknown.
                logger.error("%s: closing the calls of its process, which sent a malformed one: %s", self._name, error)
                self._close()
        del buffer[:start]

    def _release_outputs(self, places: Sequence[Sequence[Any]]) -> None:
        refs = [ref for place in places if (ref := self._lent.pop(tuple(place), None)) is not None]
        call_each(_RELEASING, [partial(self._client.release, ref) for ref in refs])

    def _load(self, number: int, name: str, config: str | None, files: dict[str, bytes]) -> None:
        _check_strings(name, config or "", *files)
        self._start(self._respond_with(number, self._server.model_control.load(name, config, files)))

    def _unload(self, number: int, name: str, with_dependents: bool) -> None:
        _check_strings(name)
        self._start(self._respond_with(number, self._server.model_control.unload(name, with_dependents)))

    def _check_readiness(self, number: int, name: str, version: str) -> None:
        _check_strings(name, version)
        self._start(self._respond_with(number, self._client.readiness.is_ready(name, version)))

    def _define_metric(self, define: Callable[..., Any], number: int, *arguments: Any) -> None:
        try:
            self._send(Kind.DONE, number, define(*arguments))
        except WeirError as error:
            self._send(Kind.FAILED, number, self._failure_text(error))

    # Inference

    def _call(self, number: int, is_decoupled: bool, row: tuple[Any, ...]) -> None:
        request, lies_in_memory = unpack_request(row, self._memory)
        self._submit(number, request, is_decoupled)
        if lies_in_memory:
            self._send(Kind.TENSORS_COPIED, number)

    @contained(on_error="_submit_failed")
    def _submit(self, number: int, request: InferRequest, is_decoupled: bool) -> None:
        try:
            if self._unreachable is not None:
                raise self._unreachable
            check_call(self._client.catalog, request, is_decoupled)
            pending = self._pending[number] = self._client.submit(request, partial(self._responded, number))
            pending.reads_content = True
            self._server.open_calls[self._key] += 1
            if self._server.open_calls[self._key] == 1:
                self._server.on_first_call(self._key)
        except WeirError as error:
            self._send(Kind.CALL_RESPONSE, number, pack_error(call_rejected(request.model_name, error)), True)

    def _submit_failed(self, error: Exception, number: int, request: InferRequest, _is_decoupled: bool) -> None:
        self._cancel(number)
        rejection = call_rejected(request.model_name, _internal_error(error))
        self._send(Kind.CALL_RESPONSE, number, pack_error(rejection), True)

    def _responded(self, number: int, outcome: InferResponse | WeirError | None, is_final: bool) -> None:
        # If this raises, the dispatcher calls it once more, with an error.
        if is_final and self._pending.pop(number, None) is not None:
            self._count_ended()
        if isinstance(outcome, WeirError):
            packed = pack_error(outcome)
        else:
            packed, refs = pack_response(outcome)
            for ref in refs:
                self._lent[ref[:3]] = ref
        self._send(Kind.CALL_RESPONSE, number, packed, is_final)
        unsent_bytes = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if not is_final and unsent_bytes > MAX_UNSENT_BYTES:
            self._cancel(number)
            slow = unavailable("the responses came faster than they were read, and the request was cancelled")
            self._send(Kind.CALL_RESPONSE, number, pack_error(slow), True)

    def _cancel_call(self, number: int, is_listening: bool) -> None:
        if not is_listening:
            self._cancel(number)
        elif (pending := self._pending.get(number)) is not None:
            self._client.cancel_and_listen(pending)

    @contained()
    def _cancel(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            self._count_ended()
            self._client.cancel(pending)

    def _count_ended(self) -> None:
        open_calls = self._server.open_calls
        open_calls[self._key] -= 1
        if not open_calls[self._key]:
            del open_calls[self._key]  # the key is used by this load of the model only

    # Model control

    @contained(on_error="_operation_failed")
    async def _respond_with(self, number: int, operation: Coroutine[Any, Any, bool | None]) -> None:
        try:
            outcome = await operation
        except WeirError as error:
            self._send(Kind.FAILED, number, self._failure_text(error))
        else:
            self._send(Kind.DONE, number, outcome)

    def _operation_failed(self, error: Exception, number: int, _operation: Coroutine[Any, Any, bool | None]) -> None:
        self._send(Kind.FAILED, number, self._failure_text(_internal_error(error)))

    def _failure_text(self, error: WeirError) -> str:
        return f"Failed to process the request for model '{self._name}', message: {error.message}"

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(self, *message: Any) -> None:
        if self._transport is not None:
            payload = msgpack.packb(message)
            self._transport.write(LENGTH.pack(len(payload)) + payload)


def unpack_request(row: tuple[Any, ...], memory: MemoryReader) -> tuple[InferRequest, bool]:
    """The request in a message, and whether some of its tensors lie in `memory`.

    Such tensors must be copied before `Kind.TENSORS_COPIED` allows the process to reuse the memory. Raises ValueError or
    TypeError for a malformed message.
    """
    name, version, request_id, correlation_id, flags, timeout_us, parameters, outputs, trace, inputs = row
    _check_strings(name, request_id, trace, *outputs, *parameters)
    if not all(type(number) is int for number in (version, flags, timeout_us)):
        raise TypeError("version, flags and timeout must be integers")
    if type(correlation_id) not in (int, str):
        raise TypeError("the correlation id must be an integer or a string")
    if not all(isinstance(value, (bool, int, str)) for value in parameters.values()):
        raise TypeError("parameters must be booleans, integers or strings")
    lies_in_memory = False
    tensors: list[Tensor] = []
    for tensor_name, datatype, shape, content in inputs:
        if type(tensor_name) is not str or datatype not in DATATYPES or not all(type(size) is int for size in shape):
            raise TypeError("a tensor needs a name, a datatype and a shape of integers")
        if type(content) is not bytes:
            content = memory.view(*content)
            lies_in_memory = True
        tensors.append(Tensor(tensor_name, datatype, list(shape), content))
    request = InferRequest(
        name,
        "" if version == _LATEST else str(version),
        request_id,
        tensors,
        [RequestedOutput(output, binary=True) for output in outputs],
        parameters or None,
    )
    request.correlation_id = correlation_id % 2**64 if isinstance(correlation_id, int) else correlation_id
    request.sequence_flags = flags & _SEQUENCE_FLAGS
    request.timeout_us = max(0, timeout_us)
    request.traceparent, request.tracestate = context_of(trace)
    return request, lies_in_memory


def check_call(catalog: Catalog, request: InferRequest, is_decoupled: bool) -> None:
    """Raises WeirError where the called model is not ready, is decoupled and was not called as such, or an input is given
    twice.
    """
    name = request.model_name
    try:
        model = catalog.resolve(name, request.model_version)
    except WeirError as error:
        text = f"Failed for execute the inference request. Model '{name}' is not ready."
        raise WeirError(error.code, text) from error
    if model.config.is_decoupled and not is_decoupled:
        raise WeirError(
            ErrorCode.UNSUPPORTED,
            f"Model {name} is using the decoupled. The current BLS request call doesn't support models using the "
            "decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for "
            "decoupled models.'",
        )
    names: set[str] = set()
    for tensor in request.inputs:
        if tensor.name in names:
            raise request_limits.invalid_request(request.id, f"input '{tensor.name}' already exists in request")
        names.add(tensor.name)


def call_rejected(model: str, error: WeirError) -> WeirError:
    """The error of a call that was rejected before it reached the queue of the called model."""
    return WeirError(error.code, f"Model {model} - Error when running inference: {error.message}")


def pack_error(error: WeirError) -> tuple[int, str]:
    """An error as it is sent to the process."""
    return error.code.number, error.message


def pack_response(response: InferResponse | None) -> tuple[tuple[Any, Any], list[PayloadRef]]:
    """A response as it is sent to the process, and the references in it; None is the end of a stream, without outputs."""
    if response is None:
        return ((), None), []
    rows = [(tensor.name, tensor.datatype, tuple(tensor.shape), tensor.data) for tensor in response.outputs]
    return (rows, response.parameters), [row[3] for row in rows if isinstance(row[3], PayloadRef)]


def _internal_error(error: Exception) -> WeirError:
    """The error of a call that failed in the worker's own code."""
    return internal(f"internal error of the worker: {type(error).__name__}: {error}")


def _check_strings(*values: Any) -> None:
    if not all(type(value) is str for value in values):
        raise TypeError("names and other texts must be strings")

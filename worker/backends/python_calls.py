"""`PythonCalls`: what Python models ask of their worker: answers of other models, and changes of the repository.

A model's process may have any number of calls under way, from its threads and coroutines, during `execute` and after it.
Each process has a connection, read and written in the worker's event loop: so a model may ask one that is served by the
same worker while its own instance's thread waits for it in `execute`. Requests go the way of a client's, through the asked
model's queue (`worker.inner_calls`). What a process asked for is given up when it ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, cast

import msgpack

from calls.model_operations import ModelOperations
from calls.pending import Pending
from runtime.containment import contained, report
from schemas.errors import WeirError, internal, unavailable
from schemas.requests import InferRequest, InferResponse
from schemas.tensors import PayloadRef
from worker.backends.python_call_messages import check_call, pack_error, pack_response, refused, unpack_request
from worker.inner_calls import InnerCalls
from worker.model_metrics import LoadMetrics, ModelMetrics, ProcessMetrics
from worker.python_stub._weir_channel import LENGTH, Kind
from worker.python_stub._weir_memory import MemoryReader

logger = logging.getLogger("weir.worker")

MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""Responses of decoupled models that a process has not read; a call that brings more is given up."""


class PythonCalls:
    """See the module. One for a worker, made in its event loop; see `worker.backend.ProcessCalls`."""

    def __init__(self, inner: InnerCalls, operations: ModelOperations, metrics: ModelMetrics | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[Any]] = set()
        self.inner = inner
        self.operations = operations
        self.metrics = metrics or ModelMetrics()
        self.under_way: Counter[str] = Counter()
        """Requests of instances, by their keys, that have no last response yet; where there are none, no entry."""
        self.on_asking: Callable[[str], None] = lambda key: None
        """Called in the event loop with the key of an instance that asks while it does not wait for others yet."""

    def connect(
        self, end: socket.socket, memory_fd: int, name: str, metrics: LoadMetrics | None = None, key: str = ""
    ) -> PythonConnection:
        """See ProcessCalls."""
        metrics = metrics or self.metrics.of_load(name, 0)
        connection = PythonConnection(self, self._loop, memory_fd, name, metrics.process(), key or name)
        self._loop.call_soon_threadsafe(self._open, connection, end)
        return connection

    def is_asking(self, key: str) -> bool:
        """See ProcessCalls."""
        return self.under_way[key] > 0

    def _open(self, connection: PythonConnection, end: socket.socket) -> None:
        end.setblocking(False)
        opening = self._loop.create_task(_connected(self._loop, connection, end))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)


async def _connected(loop: asyncio.AbstractEventLoop, connection: PythonConnection, end: socket.socket) -> None:
    try:
        await loop.create_unix_connection(lambda: connection, sock=end)
    except OSError:  # the process has ended already
        _give_up(connection, end)
    except Exception as error:  # noqa: BLE001 - reported; the process finds its calls refused, and does not wait
        report("worker.backends.python_calls: connecting the calls of a process", error)
        _give_up(connection, end)


def _give_up(connection: PythonConnection, end: socket.socket) -> None:
    end.close()
    connection.connection_lost(None)


class PythonConnection(asyncio.Protocol):
    """The calls of one process. All in the event loop, but for `close`."""

    def __init__(
        self,
        calls: PythonCalls,
        loop: asyncio.AbstractEventLoop,
        memory_fd: int,
        name: str,
        metrics: ProcessMetrics,
        key: str,
    ) -> None:
        self._key = key
        self._metrics = metrics
        self._inner = calls.inner
        self._calls = calls
        self._under_way = calls.under_way
        self._operations = calls.operations
        self._loop = loop
        self._memory_fd = memory_fd
        self._memory = MemoryReader(memory_fd)
        self._name = name
        self._buffer = bytearray()
        self._pending: dict[int, Pending] = {}
        self._lent: dict[tuple[str, int, int], PayloadRef] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._transport: asyncio.Transport | None = None
        self._is_closed = False
        self._unreachable: WeirError | None = None

    def close(self) -> None:
        """See CallConnection."""
        try:
            self._loop.call_soon_threadsafe(self._close)
        except RuntimeError:
            pass  # the worker itself has ended

    def _close(self) -> None:
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        if self._is_closed:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Gives up what the process waited for; operations on the repository go on."""
        self._is_closed = True
        self._transport = None
        for number in list(self._pending):
            self._give_up(number)
        for ref in self._lent.values():
            self._release(ref)
        self._lent.clear()
        self._metrics.close()
        os.close(self._memory_fd)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._buffer += data
        if self._inner.is_open:
            self._take()
        elif self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()
            self._start(self._open_first())

    async def _open_first(self) -> None:
        try:
            await self._inner.open()
            self._unreachable = None
        except WeirError as error:
            self._unreachable = error  # what it asks is answered by that, until it asks again
        except Exception as error:  # noqa: BLE001 - reported; whatever went wrong, the process is answered
            report("worker.backends.python_calls: opening the calls of a process", error)
            self._unreachable = _failure(error)
        self._take()
        if self._transport is not None and not self._is_closed:
            self._transport.resume_reading()

    def _take(self) -> None:
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
                self._handle(kind, *arguments)
            except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
                # Not what this end's own code there would say: it can't be relied on any more.
                logger.error("%s: what its process asks makes no sense (%s): it is answered no more", self._name, error)
                self._close()
        del buffer[:start]

    def _handle(self, kind: int | None, *arguments: Any) -> None:
        if kind == Kind.CALL:
            self._call(*arguments)
        elif kind == Kind.RELEASE:
            for place in arguments[0]:
                ref = self._lent.pop(tuple(place), None)
                if ref is not None:
                    self._release(ref)
        elif kind == Kind.GIVE_UP:
            self._give_up(arguments[0])
        elif kind == Kind.LOAD:
            number, name, config, files = arguments
            _check_texts(name, config or "", *files)
            self._start(self._told(number, self._operations.load(name, config, files)))
        elif kind == Kind.UNLOAD:
            number, name, with_dependents = arguments
            _check_texts(name)
            self._start(self._told(number, self._operations.unload(name, with_dependents)))
        elif kind == Kind.IS_MODEL_READY:
            number, name, version = arguments
            _check_texts(name, version)
            self._start(self._told(number, self._inner.readiness.is_ready(name, version)))
        elif kind == Kind.METRIC_FAMILIES_GONE:
            self._metrics.gone(*arguments)
        else:
            self._ask_metrics(kind, *arguments)

    def _ask_metrics(self, kind: int | None, number: int, *arguments: Any) -> None:
        questions = {Kind.METRIC_FAMILY: self._metrics.family, Kind.METRIC: self._metrics.metric}
        question: Callable[..., Any] | None = questions.get(kind)  # type: ignore[call-overload]
        if question is None:
            raise ValueError(f"there is no question {kind}")
        try:
            self._send(Kind.DONE, number, question(*arguments))
        except WeirError as error:
            self._send(Kind.FAILED, number, self._refusal(error))

    # Requests

    def _call(self, number: int, is_decoupled: bool, row: tuple[Any, ...]) -> None:
        request, lies_in_memory = unpack_request(row, self._memory)
        self._ask_model(number, request, is_decoupled)
        if lies_in_memory:
            self._send(Kind.TAKEN, number)

    @contained(on_error="_asking_failed")
    def _ask_model(self, number: int, request: InferRequest, is_decoupled: bool) -> None:
        try:
            if self._unreachable is not None:
                raise self._unreachable
            check_call(self._inner.catalog, request, is_decoupled)
            pending = self._pending[number] = self._inner.submit(request, partial(self._answered, number))
            pending.reads_content = True
            self._under_way[self._key] += 1
            if self._under_way[self._key] == 1:
                self._calls.on_asking(self._key)
        except WeirError as error:
            self._send(Kind.ANSWER, number, pack_error(refused(request.model_name, error)), True)

    def _asking_failed(self, error: Exception, number: int, request: InferRequest, _is_decoupled: bool) -> None:
        self._give_up(number)
        self._send(Kind.ANSWER, number, pack_error(refused(request.model_name, _failure(error))), True)

    @contained(on_error="_answering_failed")
    def _answered(self, number: int, outcome: InferResponse | WeirError | None, is_final: bool) -> None:
        if is_final:
            del self._pending[number]
            self._has_ended()
        if isinstance(outcome, WeirError):
            packed = pack_error(outcome)
        else:
            packed, refs = pack_response(outcome)
            for ref in refs:
                self._lent[ref[:3]] = ref
        self._send(Kind.ANSWER, number, packed, is_final)
        unsent_bytes = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if not is_final and unsent_bytes > MAX_UNSENT_BYTES:
            self._give_up(number)
            slow = unavailable("the responses came faster than they were read, and the rest of them was given up")
            self._send(Kind.ANSWER, number, pack_error(slow), True)

    def _answering_failed(self, error: Exception, number: int, *_: object) -> None:
        self._give_up(number)
        self._send(Kind.ANSWER, number, pack_error(_failure(error)), True)

    @contained()
    def _release(self, ref: PayloadRef) -> None:
        self._inner.release(ref)

    @contained()
    def _give_up(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            self._has_ended()
            self._inner.abandon(pending)

    def _has_ended(self) -> None:
        self._under_way[self._key] -= 1
        if not self._under_way[self._key]:
            del self._under_way[self._key]  # keys are of this load alone

    # The repository

    @contained(on_error="_operation_failed")
    async def _told(self, number: int, operation: Coroutine[Any, Any, bool | None]) -> None:
        try:
            outcome = await operation
        except WeirError as error:
            self._send(Kind.FAILED, number, self._refusal(error))
        else:
            self._send(Kind.DONE, number, outcome)

    def _operation_failed(self, error: Exception, number: int, _operation: Coroutine[Any, Any, bool | None]) -> None:
        self._send(Kind.FAILED, number, self._refusal(_failure(error)))

    def _refusal(self, error: WeirError) -> str:
        return f"Failed to process the request for model '{self._name}', message: {error.message}"

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(self, *message: Any) -> None:
        if self._transport is not None:
            payload = msgpack.packb(message)
            self._transport.write(LENGTH.pack(len(payload)) + payload)


def _failure(error: Exception) -> WeirError:
    """What a call is answered with that failed in the worker's own code."""
    return internal(f"internal error of the worker: {type(error).__name__}: {error}")


def _check_texts(*texts: Any) -> None:
    if not all(type(text) is str for text in texts):
        raise TypeError("a text is of another type")

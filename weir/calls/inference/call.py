"""`Call`: one request of a frontend, from its body to its last response.

```text
READING ──▶ SUBMITTED ⇄ WRITING ──▶ ENDED
```

A `Codec` knows the form of bodies: what a helper process has to do, how a request is read, how a response is written. A
frontend subclasses `Call`: `begin` returns what is to be read, `send` and `fail` pass on what comes of it. Small bodies
are read and written in the event loop, long ones in a helper process (`weir.runtime.offload`). Responses keep their order
meanwhile, and while the frontend holds the call because its client does not read. What waits is bounded and charged.

A call ends exactly once: with the last `send`, or `fail`, or by `cancel`, after which nothing is sent. All callbacks run in
one event loop, and no call has a task. When a helper process dies, the call whose body it had fails. Deaths of workers,
schedulers and brokers are matters of the `RequestDispatcher`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from weir.access.limits.refusals import TokensPending
from weir.calls.catalog import ServedModel
from weir.calls.dispatch import RequestDispatcher
from weir.calls.in_flight import PendingRequest
from weir.calls.inference.documents import OwnRegions, ReadContext
from weir.runtime.containment import contained
from weir.runtime.memory_ledger import Account
from weir.runtime.offload import Offload
from weir.schemas.core.errors import Reason, WeirError, internal, overloaded, unavailable
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.kserve.offloaded import Job
from weir.schemas.kserve.regions import region_id
from weir.schemas.kserve.response import MAX_WRITTEN_BYTES

MAX_WAITING_BYTES = 16 << 20
"""Responses of one request that may wait for their reader. More end the request."""

DRAIN_BYTES = 1 << 20
"""Waiting responses that are written in one turn of the event loop."""

_OUTCOME_BYTES = 200  # memory of a waiting response besides its tensors

Outcome = InferResponse | WeirError | None
"""A response, an error, or the end of the responses without a response."""


class Services(ReadContext, Protocol):
    """What calls and codecs need of their process."""

    @property
    def inference(self) -> RequestDispatcher:
        """Runs requests."""

    @property
    def offload(self) -> Offload:
        """The helper processes."""


class Codec(Protocol):
    """The form of the bodies of a frontend. `source` is what `Call.begin` returns, `context` the services of the call.

    Codecs have no state of their own.
    """

    def read_job(self, source: Any, context: Any) -> Job | None:
        """The work of a helper process on `source`; None if it is short enough to be read at once. Raises WeirError."""

    def read(self, source: Any, parts: Sequence[memoryview], context: Any) -> tuple[ServedModel, InferRequest]:
        """The model and the request. `parts` are the result of the job, if there was one. Raises WeirError."""

    def write_job(self, served: ServedModel, request: InferRequest, response: InferResponse) -> Job | None:
        """The work of a helper process on a response with large outputs; None without any. Raises WeirError."""

    def write(
        self, served: ServedModel, request: InferRequest, response: InferResponse, parts: Sequence[memoryview]
    ) -> Any:
        """The encoded response. `parts` are the result of the job, if there was one. Raises WeirError."""


async def read_request(codec: Codec, source: Any, context: Any, offload: Offload) -> tuple[ServedModel, InferRequest]:
    """The model and the request in `source`, for a frontend that stores requests. Raises WeirError."""
    job = codec.read_job(source, context)
    return codec.read(source, () if job is None else await offload.run(*job), context)


Ready = tuple[ServedModel, InferRequest, bytes | None]
"""A request that is read already. With its packed body it is that of a template, which others share
(`weir.calls.request_templates`). A plain tuple: one is made for each such request."""


class Call(ABC):
    """One request. `served` and `request` are set once it has been read; `pending` while a model may respond.

    Frontends override `begin`, `submit`, `send` and `fail`, and call `open`, `hold`, `resume` and `cancel`. Responses that
    wait are charged to `account`, `held_bytes` of `kind`.
    """

    __slots__ = (
        "_is_held",
        "_task",
        "_waiting",
        "account",
        "codec",
        "held_bytes",
        "is_counted",
        "is_over",
        "is_submitted",
        "pending",
        "request",
        "served",
        "services",
    )

    kind = "unsent"
    served: ServedModel
    request: InferRequest

    def __init__(self, services: Services, codec: Codec, account: Account | None = None) -> None:
        self.services = services
        self.codec = codec
        self.account = account
        self.pending: PendingRequest | None = None
        self.is_submitted = False
        self.is_over = False
        self.is_counted = False
        """Whether the gate has counted the request against the limits of its owner."""
        self.held_bytes = 0
        self._is_held = False
        self._task: asyncio.Future[Any] | None = None  # what it waits for: mostly a helper process
        self._waiting: deque[tuple[Outcome, bool, int]] | None = None  # responses, each with whether it is the last

    # What a frontend overrides

    @abstractmethod
    def begin(self) -> Any:
        """What the codec is to read, or a `Ready` request; None if `read` is called later. Raises WeirError."""

    def submit(self, request: InferRequest, packed: bytes | None) -> PendingRequest:
        """Submits the request with what came beside its body; a `packed` one has a template. Raises WeirError."""
        return self.services.inference.submit(request, self.on_response, served=self.served)

    @abstractmethod
    def send(self, encoded: Any, is_final: bool) -> None:
        """Sends an encoded response; None ends the responses of a decoupled model without another one."""

    @abstractmethod
    def fail(self, error: WeirError, is_final: bool = True) -> None:
        """Sends an error: the end of the request, or one in the place of a response, after which others follow."""

    def overflow(self) -> None:
        """Ends a call, which is cancelled: its client has fallen too far behind, or memory has no room for responses."""
        self.fail(unavailable("the client has fallen behind: too many responses wait for it"))

    def release(self) -> None:  # noqa: B027 - most calls have something to release, not all
        """Releases the body: the call has ended, and nothing reads it any more. May be called again."""

    @property
    def owner(self) -> str:
        """Whose shared memory the request may name, by the access policy; "" without one."""
        return ""

    # What a frontend calls

    @contained(on_error="_failed")
    def open(self) -> None:
        """Reads and submits the request."""
        try:
            source = self.begin()
            if type(source) is tuple:
                self.served, self.request, packed = source
                self.pending = self.submit(self.request, packed)
                self.is_submitted = True
            elif source is not None:
                self.read(source)
        except TokensPending as pending:
            self.wait_for_tokens(pending.wait())
        except WeirError as error:
            self._reject(error)

    def wait_for_tokens(self, settled: asyncio.Future[WeirError | None]) -> None:
        """Opens the call once its owner's rate limits let it in, or rejects it."""

        def go_on(refusal: WeirError | None) -> None:
            if refusal is not None:
                raise refusal
            self.open()

        self.is_counted = True
        self.after(settled, go_on)

    def read(self, source: Any) -> None:
        """Has the codec read `source`, here or in a helper process, and submits the request. Raises WeirError."""
        job = self.codec.read_job(source, self.services)
        if job is None:
            self._read(source, ())
        else:
            self.after(self.services.offload.start(*job), partial(self._read, source))

    def after(self, task: asyncio.Future[Any], then: Callable[[Any], None], is_final: bool = True) -> None:
        """Calls `then` with the result of `task`; the error of either ends the call, or takes the place of a response.

        Responses wait meanwhile, and `task` is cancelled with the call.
        """
        self._task = task
        task.add_done_callback(partial(self._on_done, then, is_final))

    def hold(self) -> None:
        """Sends no response from now on: the client does not read."""
        self._is_held = True

    def resume(self) -> None:
        """Sends what waits, and goes on."""
        self._is_held = False
        if self._waiting:
            self._drain()

    def cancel(self) -> None:
        """Ends the call without a response: its client has disconnected. Does nothing once it has ended."""
        self._release_after(self._stop())

    @property
    def is_reading(self) -> bool:
        """Whether a helper process reads the body."""
        return self._task is not None and not self.is_submitted

    @property
    def has_waiting(self) -> bool:
        """Whether responses wait for the client, or for a helper process."""
        return bool(self._waiting)

    # From the body to the dispatcher

    def _reject(self, error: WeirError) -> None:
        """Fails a call that is not submitted, in its turn."""
        if self._is_held:
            self.keep(error, True)
        else:
            self._end(error)

    def _read(self, source: Any, parts: Sequence[memoryview]) -> None:
        owner = self.owner
        context = OwnRegions(self.services, owner) if owner else self.services
        try:
            self.served, self.request = self.codec.read(source, parts, context)
        except TokensPending as pending:
            self.wait_for_tokens(pending.wait())
            return
        if owner and self.request.regions:
            self.request.regions = tuple(region_id(owner, name) for name in self.request.regions)
        self.pending = self.submit(self.request, None)
        self.is_submitted = True

    @contained(on_error="_failed")
    def _on_done(self, then: Callable[[Any], None], is_final: bool, task: asyncio.Future[Any]) -> None:
        if self._task is not task:  # the call was cancelled
            if not task.cancelled():
                task.exception()  # is retrieved, and of no interest
            return
        self._task = None
        if task.cancelled():
            self._end(overloaded("the server is stopping", reason=Reason.STOPPING))
            return
        error = task.exception()
        try:
            if error is None:
                then(task.result())
        except WeirError as rejection:
            error = rejection
        if isinstance(error, WeirError):
            if self.is_submitted:
                self._end(error, is_final)
            else:
                self._reject(error)
        elif error is not None:
            raise error
        if self._waiting:
            self._drain()

    # From the dispatcher to the client

    @contained(on_error="_failed")
    def on_response(self, outcome: Outcome, is_final: bool) -> None:
        """Takes a response of the model: sends it, or keeps it behind those before it."""
        if is_final:
            self.pending = None
        if self.is_over:
            return
        if self._is_held or self._waiting or self._task is not None:
            self.keep(outcome, is_final)
        else:
            self._respond(outcome, is_final)

    def keep(self, outcome: Outcome, is_final: bool) -> None:
        """Keeps an outcome until those before it are sent, or ends the call if too much waits."""
        size = _OUTCOME_BYTES
        if isinstance(outcome, InferResponse):
            size += sum(tensor.size_bytes for tensor in outcome.outputs)
        # A helper process that is slower than the model is not the client's fault: memory alone bounds what waits for it.
        has_room = is_final or not self._is_held or self.held_bytes + size <= MAX_WAITING_BYTES
        if has_room and (self.account is None or self.account.charge(self.kind, size, self)):
            self.held_bytes += size
            if self._waiting is None:
                self._waiting = deque()
            self._waiting.append((outcome, is_final, size))
        else:
            self.cancel()
            self.overflow()

    def _discharge(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes
        if self.account is not None:
            self.account.release(self.kind, size_bytes)

    @contained(on_error="_failed")
    def _drain(self) -> None:
        written = 0
        while self._waiting and not self._is_held and self._task is None:
            if written > DRAIN_BYTES:
                asyncio.get_running_loop().call_soon(self._drain)
                return
            outcome, is_final, size = self._waiting.popleft()
            written += size
            self._discharge(size)
            self._respond(outcome, is_final)

    def _respond(self, outcome: Outcome, is_final: bool, parts: Sequence[memoryview] = ()) -> None:
        """Sends what the model has responded; `parts` are what a helper process has written of it."""
        if isinstance(outcome, WeirError):
            self._end(outcome, is_final)
            return
        encoded = None
        try:
            if outcome is not None:
                size = 0
                for tensor in outcome.outputs:
                    size += len(tensor.data)
                is_long = size > MAX_WRITTEN_BYTES and not parts
                job = self.codec.write_job(self.served, self.request, outcome) if is_long else None
                if job is not None:
                    task = self.services.offload.start(*job)
                    self.after(task, partial(self._respond, outcome, is_final), is_final)
                    return
                encoded = self.codec.write(self.served, self.request, outcome, parts)
            elif not self.served.config.is_decoupled:
                raise internal("expected a single response, got 0")
        except WeirError as error:
            self._end(error, is_final)
            return
        self.send(encoded, is_final)
        if is_final and self._task is None:
            self.is_over = True
            self.release()

    def _end(self, error: WeirError, is_final: bool = True) -> None:
        """Fails the call, or sends the error in the place of one response."""
        if is_final:
            task = self._stop()
            self.fail(error)
            self._release_after(task)
        else:
            self.fail(error, False)

    def _stop(self) -> asyncio.Future[Any] | None:
        """Ends everything that is under way. Returns the cancelled task, which reads the body until it is done."""
        self.is_over = True
        if self.pending is not None:
            pending, self.pending = self.pending, None
            self.services.inference.cancel(pending)
        if self._waiting:
            self._waiting.clear()
            self._discharge(self.held_bytes)
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        return task

    def _release_after(self, task: asyncio.Future[Any] | None) -> None:
        if task is None:
            self.release()
        else:
            task.add_done_callback(lambda _task: self.release())

    def _failed(self, _error: Exception, *_arguments: object) -> None:
        """Fails the call after an unexpected exception; the client gets no internals."""
        if not self.is_over:
            (self._end if self.is_submitted else self._reject)(internal("internal server error"))

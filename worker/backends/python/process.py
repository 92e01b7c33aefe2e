"""`PythonProcess`: the process that runs one instance of a Python model.

A model's code can crash, leak, print, block and import what it likes without touching the worker or other instances.
Tensors of more than 64 KiB are not sent through a socket: both processes map the memory in which they lie. When `close`
has returned, no zombie, no open file and no process that the model has started is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from weir.runtime.child_processes import KillOnParentExit
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import PayloadRef, Reference
from weir.telemetry.log_settings import LogSettings
from weir.telemetry.logs import current_settings
from weir.telemetry.tracing.context import exported_context
from weir.worker.backend_api.custom_metrics import LoadMetrics
from weir.worker.backend_api.interface import RESCHEDULED, CallConnection, Execution, ProcessCalls, Result
from weir.worker.backends.python.channel import ResponseReader, coded_error, execution_error, unpack_response
from weir.worker.backends.python.children import start_stub
from weir.worker.backends.python.environment import WORKER_ENVIRONMENT, PythonEnvironment
from weir.worker.backends.python.microbatch import MicrobatchHost, OutcomeReader, ProcessMicrobatch
from weir.worker.devices.host_policy import HostPolicy
from weir.worker.python_stub._weir_channel import INLINE_LIMIT, Channel, Kind, StartTickets
from weir.worker.python_stub._weir_memory import MemoryReader, MemoryWriter, create_memory
from weir.worker.python_stub._weir_parent_watch import PROBE_REPLY, PROBE_REQUEST

logger = logging.getLogger("weir.worker")

MAX_LOAD_ATTEMPTS = 3
"""How often a process is started for the first load of a model while something outside of it kills it."""

PROBE_TIMEOUT_S = 5.0
"""How long a model's `is_ready` may take, as in Triton; after that the model counts as not ready."""

AUTO_COMPLETE_TIMEOUT_S = 30.0

_FAILED = int(Kind.FAILED)  # comparing with the member costs more

_EXTERNAL_KILLS = (signal.SIGKILL, signal.SIGTERM)
"""Signals that a process does not send to itself."""


class ProcessDied(Exception):
    """The process of a Python model has ended. The batch it was running has no response and may run elsewhere.

    `killed_externally`: a signal that the model did not send itself ended it (the kernel's OOM killer, for example).
    """

    def __init__(self, message: str, killed_externally: bool = False) -> None:
        super().__init__(message)
        self.killed_externally = killed_externally


class CommandFailed(Exception):
    """The process reports that it could not carry out a command. `reason` is for the client: a text, or (code, text)."""

    def __init__(self, reason: str | tuple[int, str]) -> None:
        super().__init__(reason)
        self.reason = reason


class StartFailed(WeirError):
    """The process could not be started, or could not load the model. `killed_externally` is as in `ProcessDied`."""

    def __init__(self, message: str, killed_externally: bool = False) -> None:
        super().__init__(ErrorCode.INTERNAL, message)
        self.killed_externally = killed_externally


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What the processes of one instance are started with.

    `folder` is the model's folder in the repository and `version` the name of the version's folder in it, None where the
    code lies in `folder` itself. `arguments` are those of the model's `initialize`, all of them strings: `model_config`
    (JSON), `model_instance_kind`, `model_instance_name`, `model_instance_device_id`, `model_repository`,
    `model_version`, `model_name`. `calls` serves the requests that the model sends to other models, None where it may
    send none; `metrics` are those of its loaded version. `key` identifies the instance within the worker, where several
    may have the same name.
    """

    folder: Path
    version: int | None
    filename: str = "model.py"
    arguments: Mapping[str, str] = field(default_factory=dict)
    calls: ProcessCalls | None = None
    environment: PythonEnvironment = WORKER_ENVIRONMENT
    metrics: LoadMetrics | None = None
    is_decoupled: bool = False
    key: str = ""

    @property
    def instance(self) -> str:
        """The name of the instance in error messages and logs."""
        return self.arguments.get("model_instance_name") or self.arguments.get("model_name", "")


class PythonProcess:
    """One process and what it shares with the worker: three channels, a parent watch, tickets, and five memories.

    The process starts with the object, under the host policy of the calling thread; `load` then loads the model. The
    worker sends commands on the first channel; on the second the process sends responses; on the third it sends requests
    to other models. On the parent watch the worker asks whether the model is ready, at any time.

    All methods block and belong to one thread, except `kill`, `silent_s` and `resident_bytes`, which any thread may call.
    `on_end(process)` is called, in a thread of the process, when a process whose model was loaded has ended. `probe` asks
    the model whether it is ready, None where it has no `is_ready`. The model's log follows this process's log settings
    from one batch to the next. Raises OSError when the process can't be started.
    """

    def __init__(self, spec: ProcessSpec, on_end: Callable[[PythonProcess], None] = lambda process: None) -> None:
        self.probe: ProcessReadinessProbe | None = None
        self._spec = spec
        self._on_end = on_end
        self._execute_since_s = 0.0
        self._last_return_s = 0.0
        self._log_settings: LogSettings | None = None
        self._microbatch: ProcessMicrobatch | None = None
        self._responses: ResponseReader | None = None
        self._connection: CallConnection | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        self._kill_reason = ""
        with ExitStack() as ours, ExitStack() as theirs:

            def pair(kind: socket.SocketKind = socket.SOCK_STREAM) -> tuple[socket.socket, int]:
                end, other_end = socket.socketpair(socket.AF_UNIX, kind)
                ours.callback(end.close)
                theirs.callback(other_end.close)
                return end, other_end.fileno()

            def memory(name: str) -> int:
                fd = create_memory(f"weir-python-{name}")
                ours.callback(os.close, fd)
                return fd

            commands, command_fd = pair()
            self._parent_watch, watch_fd = pair(socket.SOCK_SEQPACKET)
            inputs_fd, outputs_fd = memory("inputs"), memory("outputs")
            responses, response_fd = pair()
            self._sent_fd = memory("responses")
            self._call_end, call_fd = pair()
            self._calls_fd = memory("calls")
            metrics_fd = self._calls_fd if spec.metrics is None else spec.metrics.fd
            tickets_fd, tickets_write_fd = os.pipe()
            ours.callback(os.close, tickets_fd)
            ours.callback(os.close, tickets_write_fd)
            outcomes_fd = memory("outcomes")
            group = KillOnParentExit()
            ours.callback(group.close)
            fds = (
                *(command_fd, watch_fd, inputs_fd, outputs_fd, response_fd, self._sent_fd),
                *(call_fd, self._calls_fd, metrics_fd, tickets_fd, outcomes_fd, group.fd),
            )
            version = "" if spec.version is None else str(spec.version)
            arguments = (str(spec.folder.resolve()), version, spec.filename)
            self._process = start_stub(arguments, fds, spec.environment, HostPolicy.current())
            group.tie(self._process.pid)
            self._inputs = MemoryWriter(inputs_fd)
            ours.callback(self._inputs.close)
            self._outputs = MemoryReader(outputs_fd)
            self._commands, self._response_channel = Channel(commands), Channel(responses)
            self._tickets = StartTickets(tickets_fd, tickets_write_fd)
            self._outcomes = OutcomeReader(MemoryReader(outcomes_fd))
            self._resources = ours.pop_all()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def is_closed(self) -> bool:
        """Whether everything that was held for the process is released."""
        return self._is_closed

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended yet, as far as its channels show."""
        return not (self._is_closed or (self._responses is not None and self._responses.has_ended))

    @property
    def has_open_requests(self) -> bool:
        """Whether any request has no final response yet."""
        return self._responses is not None and self._responses.has_open_runs

    def silent_s(self, now_s: float) -> float | None:
        """For how long a busy process has not shown progress; None while it is idle. For any thread.

        Progress is that `execute` returns; of a decoupled model, also that it sends a response. That `execute` returned for
        a request of a microbatch is noticed from one call of this method to the next.
        """
        execute_since_s, responses, microbatch = self._execute_since_s, self._responses, self._microbatch
        if microbatch is not None:
            execute_since_s = max(execute_since_s, microbatch.last_start_s(now_s))
        if execute_since_s and not self._spec.is_decoupled:
            return now_s - execute_since_s
        if responses is None or not (execute_since_s or responses.has_open_runs):
            return None
        return now_s - max(self._last_return_s, responses.last_received_s)

    def resident_bytes(self) -> int:
        """The resident memory of the process; 0 once it has ended. For any thread."""
        if self._is_closed:
            return 0
        try:
            with open(f"/proc/{self.pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * mmap.PAGESIZE
        except (OSError, IndexError):
            return 0

    def load(self, timeout_s: float) -> None:
        """Loads the model and runs its `initialize`.

        Raises StartFailed with the model's own error, or when the process died or took longer than `timeout_s`, and
        WeirError with an error of Weir's code in it; the process is closed then.
        """
        spec = self._spec
        try:
            if spec.calls is None or spec.metrics is None:
                self._call_end.close()
            else:
                end, memory_fd = self._call_end.dup(), os.dup(self._calls_fd)
                self._connection = spec.calls.connect(end, memory_fd, spec.instance, spec.metrics, spec.key)
            self._log_settings = current_settings()
            self._load(Kind.LOG, self._log_settings.to_dict(), timeout_s=timeout_s)
            has_readiness = self._load(Kind.INITIALIZE, spec.arguments, timeout_s=timeout_s)
        except BaseException:
            self.close()
            raise
        self.probe = ProcessReadinessProbe(self._parent_watch) if has_readiness else None
        self._responses = ResponseReader(
            self._response_channel,
            MemoryReader(self._sent_fd),
            spec.instance,
            self.kill,
            lambda: self._on_end(self),
        )

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> list[Result | None]:
        """One result for each request; None for one whose responses the model sends through `execution`, now or later.

        A model that raises an exception or breaks the contract fails all requests of the batch: this raises WeirError
        with Triton's wording and the model's traceback. Some responses may have been sent before. Raises
        ProcessDied when the process has ended; if it ends after this has returned, `execution.fail` reports it.
        """
        responses, run = self._open_run(requests, execution)
        try:
            self._follow_log_settings()
            packed = self._command(Kind.EXECUTE, run, [self._pack(request) for request in requests])
        except CommandFailed as failure:
            responses.fail_run(run)
            raise execution_error(self._spec.instance, failure.reason) from failure
        except ProcessDied:
            self.close()  # no response may be delivered after this: the batch may run again
            raise
        finally:
            self._returned()
        responses.returned(run, len(packed) - packed.count(None))
        return [self._unpack(response) for response in packed]

    def start_microbatch(
        self,
        requests: Sequence[InferRequest],
        execution: Execution,
        on_close: Callable[[ProcessMicrobatch], None] = lambda microbatch: None,
    ) -> ProcessMicrobatch:
        """Starts to run the requests one after another, each alone; `on_close` is called by `ProcessMicrobatch.close`.

        Raises ProcessDied when the process has ended.
        """
        responses, run = self._open_run(requests, execution)

        def ended(returned: int) -> None:
            self._returned()
            responses.returned(run, returned)

        def died(error: BaseException) -> str:
            self._returned()
            reason = str(self._death(error))
            self.close()  # no response may be delivered after this: the requests may run again
            return reason

        host = MicrobatchHost(self._commands, self._tickets, self._outcomes, self._result, ended, died)
        try:
            self._follow_log_settings()
            packed = [self._pack(request) for request in requests]
            self._outcomes.rewind()
            self._tickets.take(len(requests))
            self._tickets.put(len(requests))
            self._send(Kind.EXECUTE_EACH, run, packed)
        except ProcessDied:
            self._returned()
            self.close()
            raise
        except BaseException:
            self._tickets.take(len(requests))
            self._returned()
            responses.fail_run(run)
            raise
        self._microbatch = microbatch = ProcessMicrobatch(host, len(requests), on_close)
        return microbatch

    def _open_run(self, requests: Sequence[InferRequest], execution: Execution) -> tuple[ResponseReader, int]:
        if self._responses is None or self._is_closed:
            raise ProcessDied("the model's process is not running")
        self._inputs.rewind()
        run = self._responses.open_run(execution, len(requests))
        self._execute_since_s = self._last_return_s = time.monotonic()
        return self._responses, run

    def _follow_log_settings(self) -> None:
        if current_settings() is not self._log_settings:
            self._log_settings = current_settings()
            self._command(Kind.LOG, self._log_settings.to_dict())

    def _returned(self) -> None:
        self._microbatch = None
        self._last_return_s = time.monotonic()
        self._execute_since_s = 0.0

    def kill(self, reason: str = "") -> None:
        """Kills the process and those it has started: an `execute` or `load` that is running raises, with `reason`."""
        with self._lock:
            self._kill_reason = self._kill_reason or reason
            # A dead process keeps its id until it is waited for, so this can't hit another process group.
            if self._process.returncode is None:
                self._process.kill_group()

    def stop(self, timeout_s: float) -> None:
        """Runs the model's `finalize` and ends the process, which is killed after `timeout_s` (more than 0)."""
        if self._is_closed:
            return
        deadline_s = time.monotonic() + timeout_s
        # The traceback of a model whose `finalize` fails is in the log.
        with contextlib.suppress(CommandFailed, ProcessDied, TimeoutError):
            self._command(Kind.FINALIZE, timeout_s=timeout_s)
        self.close(deadline_s - time.monotonic())

    def close(self, timeout_s: float = 0.0) -> str:
        """Waits up to `timeout_s` for the process to end, kills what is left of it, and releases everything.

        Returns how it ended, "" where it was closed before.
        """
        if self._is_closed:
            return ""
        self._is_closed = True
        self.probe = None
        if self._connection is not None:
            self._connection.close()
        if self._responses is not None:
            self._responses.close()
        if self._process.returncode is None and timeout_s > 0:
            self._process.wait(timeout_s)
        self.kill()
        ending, _ = self._exit_reason()
        self._resources.close()
        return ending

    def complete_config(self, config: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """`config` as the model's `auto_complete_config` completes it, in place of `load`. Raises as `load`."""
        self._call_end.close()
        completed: dict[str, Any] = json.loads(self._load(Kind.AUTO_COMPLETE, json.dumps(config), timeout_s=timeout_s))
        return completed

    def _load(self, kind: Kind, *arguments: Any, timeout_s: float) -> Any:
        try:
            return self._command(kind, *arguments, timeout_s=timeout_s)
        except CommandFailed as failure:
            raise coded_error(failure.reason) or StartFailed(str(failure)) from failure
        except ProcessDied as death:
            # The first sentence is Triton's.
            reason = f"T{str(death)[1:]} while it was loading the model"
            message = f"Stub process '{self._spec.instance}' is not healthy. {reason}"
            raise StartFailed(message, death.killed_externally) from death
        except TimeoutError as late:
            raise StartFailed(f"the model's process did not load the model within {timeout_s:g} s") from late

    def _command(self, kind: Kind, *arguments: Any, timeout_s: float | None = None) -> Any:
        """What the process returns for one command.

        Raises CommandFailed where it reports a failure, ProcessDied when it has ended, and TimeoutError when it has not
        answered within `timeout_s`. After a timeout it can only be closed: its late reply would be read as that of the
        next command.
        """
        try:
            if timeout_s is not None:
                self._commands.set_timeout(timeout_s)
            self._send(kind, *arguments)
            status, value = self._commands.receive()
            if timeout_s is not None:
                self._commands.set_timeout(None)
        except TimeoutError:
            raise
        except (EOFError, OSError, ValueError, TypeError, MemoryError) as error:
            raise self._death(error) from error
        if status == Kind.FAILED:
            raise CommandFailed(value)
        return value

    def _send(self, kind: Kind, *arguments: Any) -> None:
        """Sends a command. Raises TimeoutError, ProcessDied when the process has ended."""
        try:
            self._commands.send(kind, *arguments)
        except TimeoutError:
            raise
        except OSError as error:
            raise self._death(error) from error

    def _death(self, error: BaseException) -> ProcessDied:
        """Ends the process after an error on its channel or in its memory, and returns why it ended."""
        if isinstance(error, (EOFError, OSError)):
            self.kill()
            ending, killed_externally = self._exit_reason()
            return ProcessDied(f"the model's process {ending}", killed_externally)
        # The model has written into the channel or the memory, from which nothing can be read any more.
        self.kill(f"it sent a malformed message: {error}")
        return ProcessDied(f"the model's process {self._exit_reason()[0]}")

    def _exit_reason(self) -> tuple[str, bool]:
        """How the process ended, and whether a signal from outside ended it."""
        # A dead process keeps its id until it is waited for. Dying may take long, so this waits without the lock that
        # `kill` needs, and frees the id with the lock held.
        if self._process.returncode is None:
            self._process.wait()
        with self._lock:
            status = self._process.release()
        if status >= 0:
            return f"ended with status {status}", False
        if self._kill_reason:
            return f"was killed: {self._kill_reason}", False
        return f"was ended by {signal.Signals(-status).name}", -status in _EXTERNAL_KILLS

    def _pack(self, request: InferRequest) -> tuple[Any, ...]:
        return (
            request.id,
            request.correlation_id,
            request.sequence_flags,
            request.timeout_us,
            request.parameters or {},
            exported_context(request.traceparent, request.tracestate) if request.traceparent else "",
            [output.name for output in request.outputs],
            [(tensor.name, tensor.datatype, tensor.shape, self._place(tensor.data)) for tensor in request.inputs],
        )

    def _place(self, data: bytes | memoryview | Reference) -> bytes | memoryview | tuple[Any, ...]:
        if isinstance(data, PayloadRef):
            return (data.segment, data.offset, data.size)
        if isinstance(data, tuple):
            raise TypeError("the tensor's content has not been fetched")
        return data if len(data) <= INLINE_LIMIT else self._inputs.place(data)

    def _result(self, status: int, value: Any) -> Result | None:
        """The result of a request of a microbatch."""
        if status == _FAILED:
            return Result(error=execution_error(self._spec.instance, value))
        return unpack_response(self._outputs, *value) if type(value) is tuple else self._unpack(value)

    def _unpack(self, response: Any) -> Result | None:
        if response is None:
            return None
        return unpack_response(self._outputs, *response) if isinstance(response, (list, tuple)) else RESCHEDULED


class ProcessReadinessProbe:
    """Asks the process of a model whether the model is ready, also while it executes; see `version_health`.

    `end` is the worker's end of the parent watch, which remains the property of the process.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._end.setblocking(False)
        self._numbers = count(1)
        self._turn = asyncio.Lock()

    async def ask(self, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
        """What the model's `is_ready` returns; False when the process has ended or does not reply in time.

        Concurrent calls take turns; waiting for the turn counts towards each call's `timeout_s`.
        """
        number = next(self._numbers) & 0xFFFFFFFF
        try:
            # The process may end, and close its parent watch, while this waits for the reply.
            with self._end.dup() as end:
                async with asyncio.timeout(timeout_s), self._turn:
                    return await self._ask(end, number)
        except (OSError, TimeoutError):
            return False

    @staticmethod
    async def _ask(end: socket.socket, number: int) -> bool:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(end, PROBE_REQUEST.pack(number))
        while packet := await loop.sock_recv(end, PROBE_REPLY.size):
            # Replies to earlier probes that timed out may come first.
            if len(packet) == PROBE_REPLY.size and PROBE_REPLY.unpack(packet)[0] == number:
                return bool(PROBE_REPLY.unpack(packet)[1])
        return False


Loaded = TypeVar("Loaded")


def load_with_retries(load: Callable[[], Loaded], instance: str) -> Loaded:
    """What `load` returns, called again while something outside kills its process, `MAX_LOAD_ATTEMPTS` times at most."""
    for _ in range(MAX_LOAD_ATTEMPTS - 1):
        try:
            return load()
        except StartFailed as failure:
            if not failure.killed_externally:
                raise
            logger.warning("%s: %s; starting it again", instance, failure.message)
    return load()


def auto_complete(
    spec: ProcessSpec, config: Mapping[str, Any], timeout_s: float = AUTO_COMPLETE_TIMEOUT_S
) -> dict[str, Any]:
    """`config` (a model configuration as a JSON dictionary) as the model's `auto_complete_config` completes it.

    Unchanged where the model has no such function. It runs in a process that ends afterwards. Raises WeirError (INTERNAL)
    with the model's own error.
    """
    spec = replace(spec, arguments={"model_name": config.get("name", "")})

    def complete() -> dict[str, Any]:
        process = PythonProcess(spec)
        try:
            return process.complete_config(config, timeout_s)
        finally:
            process.close()

    return load_with_retries(complete, spec.instance)

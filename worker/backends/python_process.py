"""`PythonProcess`: one instance of a Python model, run in a child process of its own.

A model's code can crash, leak, print, block and import what it likes without touching the worker or other instances.
Tensors of more than 64 KiB are never sent: they lie in memory both processes have mapped.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from schemas.errors import ErrorCode, WeirError, internal
from schemas.tensors import PayloadRef, Reference
from telemetry.log_settings import LogSettings
from telemetry.logs import current_settings
from worker.backend import CallConnection, ProcessCalls
from worker.backends.python_child import ProcessDied, PythonChild, QuestionFailed
from worker.backends.python_environment import OWN_ENVIRONMENT, PythonEnvironment
from worker.backends.python_messages import (
    RESCHEDULED,
    NoSink,
    PythonRequest,
    PythonResponse,
    ResponseSink,
    unpack_response,
)
from worker.backends.python_probe import PythonProbe
from worker.backends.python_responses import ResponseReader
from worker.model_metrics import LoadMetrics
from worker.python_stub._weir_channel import INLINE_LIMIT, Kind
from worker.python_stub._weir_memory import MemoryReader, MemoryWriter

LOAD_STARTS = 3
"""How often a process is started that somebody else kills while it loads its model for the first time."""

__all__ = [
    "LOAD_STARTS",
    "ProcessDied",
    "PythonProcess",
    "PythonRequest",
    "PythonResponse",
    "StartFailed",
    "auto_complete",
]


class StartFailed(WeirError):
    """The model's process could not be started; `was_shot` as in `ProcessDied`."""

    def __init__(self, message: str, was_shot: bool = False) -> None:
        super().__init__(ErrorCode.INTERNAL, message)
        self.was_shot = was_shot


class PythonProcess:
    """One instance of a Python model. Everything blocks, and belongs to one thread; `kill` may be called by others.

    `model_dir` is the model's folder in the repository, `version` the name of the version's folder in it; None where the
    code lies in `model_dir` itself. `args` are
    what the model's `initialize` gets, all strings: `model_config` (JSON), `model_instance_kind`,
    `model_instance_name`, `model_instance_device_id`, `model_repository`, `model_version`, `model_name`. The model's log
    follows this process's settings, from one batch to the next. After `ProcessDied`, `start` runs the model anew. `calls`
    serves what the model asks of other models; without it nobody does. `metrics` are those of its loaded version, and
    `environment` is what it runs in. `on_end(process)` is called, in a thread of the process's own, when it has ended
    somehow after it was started. `probe` asks a model that has an `is_ready`. `key` is what the worker knows the instance
    by, whose name others may have too.
    """

    def __init__(
        self,
        model_dir: Path,
        version: int | None,
        model_filename: str,
        args: dict[str, str],
        calls: ProcessCalls | None = None,
        environment: PythonEnvironment = OWN_ENVIRONMENT,
        metrics: LoadMetrics | None = None,
        on_end: Callable[[PythonProcess], None] = lambda process: None,
        is_decoupled: bool = False,
        key: str = "",
    ) -> None:
        self._key = key
        self.probe: PythonProbe | None = None
        self._environment = environment
        if metrics is None and calls is not None:
            metrics = calls.metrics.of_load(args.get("model_name", ""), version or 0)
        self._metrics = metrics
        self._on_end = on_end
        self._is_decoupled = is_decoupled
        self._began_s = 0.0
        self._sign_s = 0.0
        self._where = (model_dir, version, model_filename)
        self._args = args
        self._child: PythonChild | None = None
        self._responses: ResponseReader | None = None
        self._told_log: LogSettings | None = None
        self._calls = calls
        self._connection: CallConnection | None = None

    @property
    def pid(self) -> int | None:
        """The process's id while there is one."""
        return None if self._child is None else self._child.pid

    @property
    def is_running(self) -> bool:
        """Whether there is a process, and it has not ended as far as is known."""
        return self._child is not None and not (self._responses is not None and self._responses.has_ended)

    @property
    def has_open_requests(self) -> bool:
        """Whether requests have no last answer yet."""
        return self._responses is not None and self._responses.has_open_runs

    def silent_s(self, now_s: float) -> float | None:
        """For how long nothing has come of the process that has something to do; None while it has nothing. For any thread.

        In `execute` that is since it began. What a model sends itself, as decoupled ones do, are signs of life.
        """
        began_s, responses = self._began_s, self._responses
        if began_s and not self._is_decoupled:
            return now_s - began_s
        if responses is None or not (began_s or responses.has_open_runs):
            return None
        return now_s - max(self._sign_s, responses.last_heard_s)

    def resident_bytes(self) -> int:
        """The memory that the process holds just now; 0 for one that is gone. For any thread."""
        child = self._child
        if child is None:
            return 0
        try:
            with open(f"/proc/{child.pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * mmap.PAGESIZE
        except (OSError, IndexError):
            return 0

    def start(self, timeout_s: float) -> None:
        """Starts the process, loads the model and runs its `initialize`.

        Raises StartFailed with the model's own error, or when it died or took longer than `timeout_s`.
        """
        self._close()
        metrics_fd = None if self._metrics is None else self._metrics.fd
        child = self._child = PythonChild(*self._where, self._environment, metrics_fd)
        self._inputs = MemoryWriter(child.inputs_fd)
        self._outputs = MemoryReader(child.outputs_fd)
        if self._calls is None or self._metrics is None:
            child.call_end.close()
        else:
            name = self._args.get("model_instance_name", "")
            self._connection = self._calls.connect(
                child.call_end.dup(), os.dup(child.calls_fd), name, self._metrics, self._key
            )
        try:
            self._told_log = current_settings()
            _ask_to_load(child, self._shown_name, Kind.LOG, self._told_log.told(), timeout_s=timeout_s)
            has_a_say = _ask_to_load(child, self._shown_name, Kind.INITIALIZE, self._args, timeout_s=timeout_s)
        except BaseException:
            self._close()
            raise
        self.probe = PythonProbe(child.lifeline) if has_a_say else None
        memory = MemoryReader(child.responses_fd)
        self._responses = ResponseReader(
            child.response_channel,
            lambda first, second: unpack_response(memory, first, second),
            self._failure,
            child.kill,
            self._args.get("model_instance_name", ""),
            lambda: self._on_end(self),
        )

    def execute(
        self, requests: Sequence[PythonRequest], sink: ResponseSink | None = None
    ) -> list[PythonResponse | None]:
        """One response for each request; None for one whose responses the model has sent, or will send, to `sink`.

        RESCHEDULED is for one that the model wants to be run again.

        A model that raises or breaks the contract fails every request of the batch (INTERNAL, with Triton's wording and
        the model's traceback); it may have sent some responses before. Raises ProcessDied when there is no process, or
        none any more; once this has returned, `sink.fail` tells of that.
        """
        child, responses = self._running()
        self._inputs.rewind()
        run = responses.begin(sink or NoSink(), len(requests))
        self._began_s = self._sign_s = time.monotonic()
        try:
            if current_settings() is not self._told_log:
                self._tell_log(child)
            answers = child.ask(Kind.EXECUTE, run, [self._packed(request) for request in requests])
        except QuestionFailed as failure:
            responses.forget(run)
            error = self._failure(str(failure))
            return [PythonResponse(error=error, raised=True) for _ in requests]
        except ProcessDied:
            self._close()
            raise
        finally:
            self._sign_s = time.monotonic()
            self._began_s = 0.0
        responses.returned(run, len(answers) - answers.count(None))
        return [self._unpacked(answer) for answer in answers]

    def _unpacked(self, answer: Any) -> PythonResponse | None:
        if answer is None:
            return None
        return unpack_response(self._outputs, *answer) if isinstance(answer, (list, tuple)) else RESCHEDULED

    def kill(self, reason: str = "") -> None:
        """Kills the process: an `execute` under way raises ProcessDied, a `start` WeirError. For any thread."""
        child = self._child
        if child is not None:
            child.kill(reason)

    def bury(self) -> str:
        """Gives up all that is held of a process that has died, or is killed by this; how it ended, "" if that was told."""
        return self._close()

    def stop(self, timeout_s: float) -> None:
        """Runs the model's `finalize` and ends the process; after `timeout_s` (more than 0) it is killed."""
        child = self._child
        if child is None:
            return
        deadline = time.monotonic() + timeout_s
        try:
            child.ask(Kind.FINALIZE, timeout_s=timeout_s)
        except (QuestionFailed, ProcessDied, TimeoutError):
            pass  # a failing model's traceback is in the log, and nobody is left to hear of it
        self._close(deadline - time.monotonic())

    def _tell_log(self, child: PythonChild) -> None:
        self._told_log = current_settings()
        child.ask(Kind.LOG, self._told_log.told())

    def _running(self) -> tuple[PythonChild, ResponseReader]:
        if self._child is None or self._responses is None:
            raise ProcessDied("the model's process is not running")
        return self._child, self._responses

    def _close(self, timeout_s: float = 0.0) -> str:
        child, self._child = self._child, None
        responses, self._responses = self._responses, None
        self.probe = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if responses is not None:
            responses.close()
        if child is not None:
            self._inputs.close()
            return child.close(timeout_s)
        return ""

    @property
    def _shown_name(self) -> str:
        return self._args.get("model_instance_name") or self._args.get("model_name", "")

    def _failure(self, text: str) -> WeirError:
        return internal(f"Failed to process the request(s) for model '{self._shown_name}', message: {text}")

    def _packed(self, request: PythonRequest) -> tuple[Any, ...]:
        return (
            request.id,
            request.correlation_id,
            request.flags,
            request.timeout_us,
            request.parameters,
            request.trace,
            request.outputs,
            [(tensor.name, tensor.datatype, tensor.shape, self._place(tensor.data)) for tensor in request.inputs],
        )

    def _place(self, data: bytes | memoryview | Reference) -> bytes | memoryview | tuple[Any, ...]:
        if isinstance(data, PayloadRef):
            return (data.segment, data.offset, data.size)
        if isinstance(data, tuple):
            raise TypeError("the tensor's content has not been fetched")
        return data if len(data) <= INLINE_LIMIT else self._inputs.place(data)


def auto_complete(
    model_dir: Path,
    version: int | None,
    model_filename: str,
    config: dict[str, Any],
    timeout_s: float = 30.0,
    environment: PythonEnvironment = OWN_ENVIRONMENT,
) -> dict[str, Any]:
    """`config` (a model configuration as JSON's dictionary) as the model's `auto_complete_config` completes it.

    Unchanged where the model has no such function. It runs in a process of its own, which ends with it. Raises
    WeirError (INTERNAL) with the model's own error.
    """
    for attempt in range(1, LOAD_STARTS + 1):
        child = PythonChild(model_dir, version, model_filename, environment)
        child.call_end.close()
        try:
            name = config.get("name", "")
            completed = _ask_to_load(child, name, Kind.AUTO_COMPLETE, json.dumps(config), timeout_s=timeout_s)
            break
        except StartFailed as failure:
            if not failure.was_shot or attempt == LOAD_STARTS:
                raise
        finally:
            child.close()
    result: dict[str, Any] = json.loads(completed)
    return result


def _ask_to_load(child: PythonChild, name: str, kind: Kind, *arguments: Any, timeout_s: float) -> Any:
    try:
        return child.ask(kind, *arguments, timeout_s=timeout_s)
    except QuestionFailed as failure:
        raise StartFailed(str(failure)) from failure
    except ProcessDied as death:
        # The first sentence is Triton's.
        reason = f"T{str(death)[1:]} while it was loading the model"
        raise StartFailed(f"Stub process '{name}' is not healthy. {reason}", death.was_shot) from death
    except TimeoutError as late:
        raise StartFailed(f"the model's process did not load the model within {timeout_s:g} s") from late

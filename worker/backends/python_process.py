"""`PythonProcess`: one instance of a Python model, run in a child process of its own.

A model's code can crash, leak, print, block and import what it likes without touching the worker or other instances.
Tensors of more than 64 KiB are never sent: they lie in memory both processes have mapped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.errors import ErrorCode, WeirError, internal
from schemas.requests import Parameters
from schemas.tensors import PayloadRef, Tensor
from worker.backends.python_child import ProcessDied, PythonChild, QuestionFailed
from worker.python_stub._weir_channel import INLINE_LIMIT, Kind
from worker.python_stub._weir_memory import MemoryReader, MemoryWriter

__all__ = ["ProcessDied", "PythonProcess", "PythonRequest", "PythonResponse", "auto_complete"]


@dataclass(slots=True)
class PythonRequest:
    """One request of a batch, as a Python model sees it.

    `flags` are `schemas.requests.SEQUENCE_START` and `SEQUENCE_END`; `timeout_us` is 0 for none; `outputs` are the
    names the caller asked for, empty for all. Tensor data is bytes, a view, or a reference to a shared-memory segment.
    """

    id: str = ""
    correlation_id: int | str = 0
    flags: int = 0
    timeout_us: int = 0
    parameters: Parameters = field(default_factory=dict)
    outputs: Sequence[str] = ()
    inputs: Sequence[Tensor] = ()


@dataclass(slots=True)
class PythonResponse:
    """A model's answer to one request: outputs and response parameters, or an error.

    `raised` tells a failure to run from an error that the model answered. Outputs of more than 64 KiB are read-only views
    that last until the next `execute` of the same process.
    """

    outputs: list[Tensor] = field(default_factory=list)
    error: WeirError | None = None
    parameters: Parameters | None = None
    raised: bool = False


class PythonProcess:
    """One instance of a Python model. Everything blocks, and belongs to one thread; `kill` may be called by others.

    `model_dir` is the model's folder in the repository, `version` the name of the version's folder in it. `args` are
    what the model's `initialize` gets, all strings: `model_config` (JSON), `model_instance_kind`,
    `model_instance_name`, `model_instance_device_id`, `model_repository`, `model_version`, `model_name`. `verbose` lets
    the model's verbose log lines through. After `ProcessDied`, `start` runs the model anew.
    """

    def __init__(
        self, model_dir: Path, version: int, model_filename: str, args: dict[str, str], *, verbose: bool = False
    ) -> None:
        self._where = (model_dir, version, model_filename)
        self._args = args
        self._verbose = verbose
        self._child: PythonChild | None = None

    @property
    def pid(self) -> int | None:
        """The process's id while there is one."""
        return None if self._child is None else self._child.pid

    def start(self, timeout_s: float) -> None:
        """Starts the process, loads the model and runs its `initialize`.

        Raises WeirError (INTERNAL) with the model's own error, or when it died or took longer than `timeout_s`.
        """
        self._close()
        child = self._child = PythonChild(*self._where)
        self._inputs = MemoryWriter(child.inputs_fd)
        self._outputs = MemoryReader(child.outputs_fd)
        try:
            _ask_to_load(child, Kind.INITIALIZE, self._args, self._verbose, timeout_s=timeout_s)
        except BaseException:
            self._close()
            raise

    def execute(self, requests: Sequence[PythonRequest]) -> list[PythonResponse]:
        """One response for each request.

        A model that raises or breaks the contract fails every request of the batch (INTERNAL, with Triton's wording and
        the model's traceback). Raises ProcessDied when there is no process, or none any more.
        """
        child = self._running()
        self._inputs.rewind()
        try:
            answers = child.ask(Kind.EXECUTE, [self._packed(request) for request in requests])
        except QuestionFailed as failure:
            instance = self._args.get("model_instance_name") or self._args.get("model_name", "")
            message = f"Failed to process the request(s) for model '{instance}', message: {failure}"
            return [PythonResponse(error=internal(message), raised=True) for _ in requests]
        except ProcessDied:
            self._close()
            raise
        return [self._unpacked(*answer) for answer in answers]

    def is_ready(self, timeout_s: float = 5.0) -> bool:
        """What the model's `is_ready` says, True where it has none; False when it fails or there is no process.

        One that does not answer in time is ended.
        """
        try:
            return bool(self._running().ask(Kind.IS_READY, timeout_s=timeout_s))
        except QuestionFailed:
            return False
        except (ProcessDied, TimeoutError):
            self._close()
            return False

    def kill(self) -> None:
        """Kills the process: an `execute` under way raises ProcessDied, a `start` WeirError. For any thread."""
        child = self._child
        if child is not None:
            child.kill()

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

    def _running(self) -> PythonChild:
        if self._child is None:
            raise ProcessDied("the model's process is not running")
        return self._child

    def _close(self, timeout_s: float = 0.0) -> None:
        child, self._child = self._child, None
        if child is not None:
            self._inputs.close()
            child.close(timeout_s)

    def _packed(self, request: PythonRequest) -> tuple[Any, ...]:
        return (
            request.id,
            request.correlation_id,
            request.flags,
            request.timeout_us,
            request.parameters,
            request.outputs,
            [(tensor.name, tensor.datatype, tensor.shape, self._place(tensor.data)) for tensor in request.inputs],
        )

    def _place(self, data: bytes | memoryview | PayloadRef) -> bytes | memoryview | tuple[Any, ...]:
        if isinstance(data, PayloadRef):
            return (data.segment, data.offset, data.size)
        return data if len(data) <= INLINE_LIMIT else self._inputs.place(data)

    def _unpacked(self, first: Any, second: Any) -> PythonResponse:
        if isinstance(first, int):
            return PythonResponse(error=WeirError(ErrorCode.from_number(first), second))
        outputs = [
            Tensor(name, datatype, shape, content if isinstance(content, bytes) else self._outputs.view(*content))
            for name, datatype, shape, content in first
        ]
        return PythonResponse(outputs, None, second)


def auto_complete(
    model_dir: Path, version: int, model_filename: str, config: dict[str, Any], timeout_s: float = 30.0
) -> dict[str, Any]:
    """`config` (a model configuration as JSON's dictionary) as the model's `auto_complete_config` completes it.

    Unchanged where the model has no such function. It runs in a process of its own, which ends with it. Raises
    WeirError (INTERNAL) with the model's own error.
    """
    child = PythonChild(model_dir, version, model_filename)
    try:
        completed = _ask_to_load(child, Kind.AUTO_COMPLETE, json.dumps(config), timeout_s=timeout_s)
    finally:
        child.close()
    result: dict[str, Any] = json.loads(completed)
    return result


def _ask_to_load(child: PythonChild, kind: Kind, *arguments: Any, timeout_s: float) -> Any:
    try:
        return child.ask(kind, *arguments, timeout_s=timeout_s)
    except QuestionFailed as failure:
        raise internal(str(failure)) from failure
    except ProcessDied as death:
        raise internal(f"{death} while it was loading the model") from death
    except TimeoutError as late:
        raise internal(f"the model's process did not load the model within {timeout_s:g} s") from late

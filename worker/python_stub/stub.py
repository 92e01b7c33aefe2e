"""Runs one instance of a Python model.

    stub.py <channel fd> <parent watch fd> <inputs fd> <outputs fd> <response channel fd> <responses fd>
            <call channel fd> <call memory fd> <metrics fd> <tickets fd> <outcomes fd> <process group fd>
            <model folder> <version> <model file name>
    stub.py fork-server <control socket fd>

The process group's file is only kept open: through it the kernel kills what the model has started when the worker ends. The
version is empty where the file lies in the folder itself, as the code of a backend that many models share does.

A model finds its own modules before all others. Nothing that a model prints or raises disturbs the channels to the worker.
The process never outlives the worker. The second form imports the same and forks a process for each request of the worker.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import json
import os
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_HERE = os.path.dirname(os.path.abspath(__file__))
_PATH = [entry for entry in sys.path if entry != _HERE]
sys.path.insert(0, _HERE)
# Where the model's environment has no msgpack, that of the worker is on the path while it is imported.
sys.path.append(os.environ.pop("WEIR_STUB_PATH", _HERE))

import msgpack  # noqa: E402
import triton_python_backend_utils as pb_utils  # noqa: E402  # beside this file, on the path only here
from _weir_calls import Calls  # noqa: E402
from _weir_channel import Channel, Kind, StartTickets  # noqa: E402
from _weir_errors import BackendError  # noqa: E402
from _weir_fork_server import ARGUMENT as FORK_SERVER  # noqa: E402
from _weir_fork_server import ForkServer  # noqa: E402
from _weir_logger import log_exception, log_exceptions_of_threads  # noqa: E402
from _weir_memory import MemoryWriter  # noqa: E402
from _weir_metrics import Metrics  # noqa: E402
from _weir_parent_watch import ParentWatch  # noqa: E402
from _weir_response import ResponseChannel, ResponsePacker  # noqa: E402
from _weir_shared_memory import InputMemory  # noqa: E402

sys.path[:] = _PATH

MAX_MICROBATCH_OUTPUT_BYTES = 32 * 1024 * 1024
"""Large outputs of one microbatch; the requests that would add to more do not start, and their tickets remain."""

_FDS = 12  # file descriptors among the arguments

RESCHEDULED = 0
"""Stands in place of the response to a request that is to run again."""


class Coroutines:
    """One event loop for all coroutines of a model, created with the first one.

    The loop always runs, in a thread of its own: tasks and callbacks that a coroutine leaves behind continue after it.
    """

    def __init__(self) -> None:
        self._loop: Any = None
        self._starting = threading.Lock()
        self._has_started = False
        self._running: set[Any] = set()  # the loop itself holds only weak references

    def awaited(self, result: Any) -> Any:
        """The result of a coroutine; any other value unchanged. Not for the loop's thread."""
        if not isinstance(result, types.CoroutineType):
            return result
        import asyncio  # costs a third of the start-up time, and few models need it

        return asyncio.run_coroutine_threadsafe(result, self._running_loop()).result()

    def awaited_elsewhere(self, result: Any) -> Any:
        """As `awaited`, but in a new loop unless `start` was used: `execute` may block the shared one."""
        if not isinstance(result, types.CoroutineType) or self._has_started:
            return self.awaited(result)
        import asyncio

        return asyncio.run(result)

    def start(self, coroutine: Any, on_error: Callable[[BaseException], None]) -> None:
        """Runs the coroutine in the loop's thread; `on_error` is called there if it raises."""
        import asyncio

        async def run() -> None:
            try:
                await coroutine
            except BaseException as error:  # noqa: BLE001  # user code
                on_error(error)

        self._has_started = True
        future = asyncio.run_coroutine_threadsafe(run(), self._running_loop())
        self._running.add(future)
        future.add_done_callback(self._running.discard)

    def _running_loop(self) -> Any:
        import asyncio

        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._run_loop, name="event loop", daemon=True).start()
        return self._loop

    def _run_loop(self) -> None:
        import asyncio

        asyncio.set_event_loop(self._loop)
        while True:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                # The task that raised this ends with it; the loop and its other tasks continue.
                log_exception(
                    "a task of the model raised an exception that ends event loops; the loop continues", error
                )


class _ContractViolation(Exception):
    """The model violates the contract; the text is the message, without a traceback."""


class Connections(NamedTuple):
    """What this process shares with its worker."""

    commands: Channel
    inputs: InputMemory
    outputs: MemoryWriter
    tickets: StartTickets
    outcomes: MemoryWriter
    responses: ResponseChannel
    metrics: Metrics
    parent_watch: ParentWatch


class Stub:
    """Hosts the model: carries out the worker's commands, one at a time, in the main thread."""

    def __init__(self, location: list[str], connections: Connections) -> None:
        self._folder, self._version, self._filename = location
        self._channel = connections.commands
        self._inputs = connections.inputs
        self._packer = ResponsePacker(connections.outputs)
        self._tickets = connections.tickets
        self._outcomes = connections.outcomes
        # User text may hold lone surrogates, which must not break the message.
        self._pack = msgpack.Packer(autoreset=True, unicode_errors="replace").pack
        self._responses = connections.responses
        self._calls = connections.metrics.calls
        self._metrics = connections.metrics
        self._parent_watch = connections.parent_watch
        self._coroutines = Coroutines()
        self._model: Any = None
        self._instance_name = ""
        self._output_names: list[str] = []

    def serve(self) -> None:
        """Carries out commands up to FINALIZE, or until the worker ends."""
        handlers = {
            Kind.INITIALIZE: self._initialize,
            Kind.AUTO_COMPLETE: self._auto_complete,
            Kind.EXECUTE: self._execute,
            Kind.EXECUTE_EACH: self._execute_each,
            Kind.LOG: self._configure_log,
            Kind.FINALIZE: self._finalize,
        }
        kind = None
        while kind != Kind.FINALIZE:
            try:
                kind, *arguments = self._channel.receive()
            except (EOFError, OSError):
                return
            reply = self._reply(handlers[kind], arguments)
            self._inputs.detach()
            self._metrics.report_deleted()
            try:
                self._channel.send(*reply)
            except (TypeError, ValueError, OverflowError) as error:
                self._channel.send(Kind.FAILED, f"the response can't be sent: {error}")

    def _reply(self, handler: Any, arguments: Sequence[Any]) -> tuple[Kind, Any]:
        try:
            return Kind.DONE, handler(*arguments)
        except _ContractViolation as violation:
            return Kind.FAILED, str(violation)
        except BackendError as error:
            return Kind.FAILED, (error.code, str(error))
        except BaseException as error:  # noqa: BLE001  # user code: the exception is the reply, as in Triton
            log_exception("the model raised an exception", error)
            return Kind.FAILED, self._describe(error)

    def _describe(self, error: BaseException) -> str:
        """The error and its traceback, innermost call first, without absolute paths."""
        calls = [
            f"  {self._shown(frame.filename)}({frame.lineno}): {frame.name}\n"
            for frame in reversed(traceback.extract_tb(error.__traceback__))
            if not frame.filename.startswith((_HERE, "<frozen importlib"))
        ]
        text = "".join(traceback.format_exception_only(error)).rstrip("\n")
        # Without the module of its class, as Triton shows it.
        text = text.removeprefix(f"{type(error).__module__}.")
        text = text.replace(self._folder + os.sep, "")
        return text + ("\n\nAt:\n" + "".join(calls) if calls else "")

    def _shown(self, filename: str) -> str:
        inside = filename.startswith(self._folder + os.sep)
        return os.path.relpath(filename, self._folder) if inside else os.path.basename(filename)

    def _load(self) -> Any:
        stem = os.path.splitext(self._filename)[0]
        if not self._version:
            sys.path.insert(0, self._folder)
            return importlib.import_module(stem).TritonPythonModel
        version_folder = os.path.join(self._folder, self._version)
        if not os.path.isfile(os.path.join(version_folder, self._filename)):
            place = os.path.join(os.path.basename(self._folder), self._version, self._filename)
            raise _ContractViolation(f"Python model file not found in '{place}'")
        pb_utils.ModelDirectory.path = version_folder
        sys.path[:0] = [version_folder, self._folder]
        # As a member of the version's folder, so that relative imports work as in Triton.
        module = importlib.import_module(f"{self._version}.{stem}")
        return module.TritonPythonModel

    def _configure_log(self, settings: dict[str, Any]) -> None:
        pb_utils.Logger.configure(**settings)

    def _initialize(self, arguments: dict[str, str]) -> bool:
        """Whether the model has an `is_ready`."""
        config = json.loads(arguments.get("model_config") or "{}")
        self._responses.is_decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        if self._responses.is_decoupled:
            self._responses.start_reporting_drops()
        self._instance_name = self._metrics.instance = arguments.get("model_instance_name", "")
        self._output_names = [output["name"] for output in config.get("output", ())]
        model = self._load()()
        if not hasattr(model, "execute"):
            raise _ContractViolation("TritonPythonModel has no method 'execute'")
        self._calls.controls_models = True
        if hasattr(model, "initialize"):
            self._coroutines.awaited(model.initialize(arguments))
        self._model = model
        self._calls.is_allowed = True
        has_readiness = hasattr(model, "is_ready")
        if has_readiness:
            self._parent_watch.reply_with(self._is_ready)
        return has_readiness

    def _auto_complete(self, config: str) -> str:
        model = self._load()
        if not hasattr(model, "auto_complete_config"):
            return config
        completed = model.auto_complete_config(pb_utils.ModelConfig(config))
        if not isinstance(completed, pb_utils.ModelConfig):
            name = json.loads(config).get("name", "")
            raise _ContractViolation(
                f"auto_complete_config function in model '{name}' must return a valid pb.ModelConfig object."
            )
        return json.dumps(completed.as_dict())

    def _is_ready(self) -> bool:
        """What the model's `is_ready` returns. Called in another thread, while `execute` may be running."""
        try:
            ready = self._coroutines.awaited_elsewhere(self._model.is_ready())
            if not isinstance(ready, bool):
                raise _ContractViolation(f"is_ready must return a bool, found type '{type(ready)}'.")
            return ready
        except BaseException as error:  # noqa: BLE001  # user code: any exception means that it is not ready
            log_exception("the model's is_ready raised an exception", error)
            return False

    def _finalize(self) -> None:
        self._calls.is_allowed = self._calls.controls_models = False
        if hasattr(self._model, "finalize"):
            self._coroutines.awaited(self._model.finalize())

    def _execute(self, run: int, rows: tuple[Any, ...]) -> list[Any]:
        self._packer.rewind()
        responses: list[Any] = [None] * len(rows)
        requests: list[pb_utils.InferenceRequest] = []
        places: list[int] = []
        for place, row in enumerate(rows):
            try:
                requests.append(self._request(row, (run, place)))
                places.append(place)
            except (OSError, ValueError) as error:
                responses[place] = _unreadable(error)
        if requests:
            try:
                # The model gets a copy of the list, which it may change.
                if self._responses.is_decoupled:
                    returned = self._run_decoupled(run, requests)
                else:
                    returned = self._run(requests)
            except BaseException:
                _close(requests)
                raise
            for place, response in zip(places, returned, strict=True):
                responses[place] = response
        return responses

    def _execute_each(self, run: int, rows: tuple[Any, ...]) -> int:
        self._packer.rewind()
        self._outcomes.rewind()
        for place, row in enumerate(rows):
            if self._packer.used_bytes > MAX_MICROBATCH_OUTPUT_BYTES or not self._tickets.take():
                break
            start_ns = time.monotonic_ns()
            status, value = self._reply(self._execute_one, (run, place, row))
            outcome = start_ns, time.monotonic_ns(), status, value
            try:
                packed = self._pack(outcome)
            except (TypeError, ValueError, OverflowError) as error:
                packed = self._pack((*outcome[:2], Kind.FAILED, f"the response can't be sent: {error}"))
            self._outcomes.append(packed)
        return self._outcomes.used_bytes

    def _execute_one(self, run: int, place: int, row: tuple[Any, ...]) -> Any:
        try:
            request = self._request(row, (run, place))
        except (OSError, ValueError) as error:
            return _unreadable(error)
        try:
            return self._run([request])[0]
        except BaseException:
            request.close()
            raise

    def _request(self, row: tuple[Any, ...], place: tuple[int, int]) -> pb_utils.InferenceRequest:
        *facts, outputs, inputs = row
        tensors = [
            pb_utils.Tensor.received(
                name, datatype, shape, content if isinstance(content, bytes) else self._inputs.array(content)
            )
            for name, datatype, shape, content in inputs
        ]
        wanted = outputs or self._output_names
        return pb_utils.InferenceRequest.received(facts, wanted, tensors, self._responses, place)

    def _run(self, requests: list[pb_utils.InferenceRequest]) -> list[Any]:
        """The packed response to each request; None where its response sender sends it."""
        returned = self._coroutines.awaited(self._model.execute(list(requests)))
        responses = [None] * len(requests) if returned is None else returned
        if not isinstance(responses, list):
            raise _ContractViolation(f"Expected a list in the execute return, found type '{type(responses)}'.")
        if len(responses) != len(requests):
            raise _ContractViolation(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(responses)}\n"
            )
        packed: list[Any] = []
        for request, response in zip(requests, responses, strict=True):
            if request.is_rescheduled():
                if response is not None:
                    raise _ContractViolation(
                        "Expected a None object in the execute function return list for reschduled request, "
                        f"found type '{type(response)}'."
                    )
                request.close()
                packed.append(RESCHEDULED)
            elif isinstance(response, pb_utils.InferenceResponse):
                request.returned()
                packed.append(self._packer.pack(response, request.requested_output_names()))
            elif response is not None:
                raise _ContractViolation(
                    "Expected an 'InferenceResponse' object in the execute function return list, "
                    f"found type '{type(response)}'."
                )
            elif request.has_sender():
                packed.append(None)
            else:
                # Without a response sender nothing can respond to it later.
                packed.append((pb_utils.TritonError.INTERNAL, "expected a single response, got 0"))
        return packed

    def _run_decoupled(self, run: int, requests: list[pb_utils.InferenceRequest]) -> list[Any]:
        """RESCHEDULED for each request that is to run again; None for the others, to which their senders respond."""
        returned = self._model.execute(list(requests))
        if isinstance(returned, types.CoroutineType):
            self._coroutines.start(returned, lambda error: self._run_failed(run, requests, error))
        elif returned is not None:
            raise _ContractViolation(
                f"Python model '{self._instance_name}' is using the decoupled mode and the execute function must "
                "return None."
            )
        rescheduled = [request for request in requests if request.is_rescheduled()]
        _close(rescheduled)
        return [RESCHEDULED if request in rescheduled else None for request in requests]

    def _run_failed(self, run: int, requests: list[pb_utils.InferenceRequest], error: BaseException) -> None:
        log_exception("a coroutine of the model raised an exception", error)
        _close(requests)
        self._responses.ask(Kind.RUN_FAILED, run, self._describe(error))


def _unreadable(error: OSError | ValueError) -> tuple[int, str]:
    """The response to a request whose input's segment was removed with its owner."""
    reason = error.strerror if isinstance(error, OSError) else error
    return pb_utils.TritonError.INTERNAL, f"failed to read an input from shared memory: {reason}"


def _close(requests: list[pb_utils.InferenceRequest]) -> None:
    for request in requests:
        request.close()


def main() -> None:
    """Serves one model until the worker finalizes it; as a fork server, in each process that it forks."""
    # As in an interpreter that is embedded in a server, a model sees no arguments.
    arguments, sys.argv = sys.argv[1:], [""]
    if arguments[0] == FORK_SERVER:
        forked = ForkServer(socket.socket(fileno=int(arguments[1]))).serve()
        if forked is None:
            return
        arguments = forked
    _serve(arguments)


def _serve(arguments: list[str]) -> None:
    fds = [int(argument) for argument in arguments[:_FDS]]
    channel_fd, watch_fd, inputs_fd, outputs_fd, response_channel_fd, responses_fd, call_channel_fd, *memories = fds
    calls_fd, metrics_fd, tickets_fd, outcomes_fd, _ = memories
    parent_watch = ParentWatch(socket.socket(fileno=watch_fd))
    faulthandler.enable()
    log_exceptions_of_threads()
    for fd in fds:
        os.set_inheritable(fd, False)
    channel = Channel(socket.socket(fileno=channel_fd))
    response_channel = Channel(socket.socket(fileno=response_channel_fd))
    call_channel = Channel(socket.socket(fileno=call_channel_fd))
    # A process that the model forks must not keep the channels open after this one has ended.
    for open_channel in (channel, response_channel, call_channel):
        os.register_at_fork(after_in_child=open_channel.close)
    os.register_at_fork(after_in_child=parent_watch.close_after_fork)
    # Compiled files would appear in the model repository, and changes there cause reloads.
    sys.dont_write_bytecode = True
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    responses = ResponseChannel(response_channel, MemoryWriter(responses_fd))
    calls = Calls.current = Calls(call_channel, MemoryWriter(calls_fd))
    metrics = Metrics.current = Metrics(calls, metrics_fd)
    inputs, outputs = InputMemory(inputs_fd), MemoryWriter(outputs_fd)
    tickets, outcomes = StartTickets(tickets_fd), MemoryWriter(outcomes_fd)
    connections = Connections(channel, inputs, outputs, tickets, outcomes, responses, metrics, parent_watch)
    Stub(arguments[_FDS:], connections).serve()


if __name__ == "__main__":
    main()

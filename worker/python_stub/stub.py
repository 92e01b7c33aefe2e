"""Runs one instance of a Python model.

    stub.py <channel fd> <lifeline fd> <inputs fd> <outputs fd> <response channel fd> <responses fd> <call channel fd>
            <call memory fd> <metrics fd> <group tie fd> <model folder> <version> <model file name>

The tie is only kept open: the kernel sees to it that what the model starts ends with the worker.
The version is empty where the file lies in the folder itself: the code of a backend that many models share.

It promises that a model finds its own modules before anybody else's, that nothing a model prints or raises disturbs the
channel to the worker, and that the process never outlives the worker.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import json
import os
import socket
import sys
import traceback
import types
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_PATH = [entry for entry in sys.path if entry != _HERE]
sys.path.insert(0, _HERE)
# Where the model's environment lacks msgpack, the worker lends its own, for as long as it takes to import it.
sys.path.append(os.environ.pop("WEIR_STUB_PATH", _HERE))

import triton_python_backend_utils as pb_utils  # noqa: E402  # found beside this file only while its folder is on the path
from _weir_calls import Calls  # noqa: E402
from _weir_channel import Channel, Kind  # noqa: E402
from _weir_coroutines import Coroutines  # noqa: E402
from _weir_lifeline import Lifeline  # noqa: E402
from _weir_logger import log_exception, log_exceptions_of_threads  # noqa: E402
from _weir_mapping import InputMemory  # noqa: E402
from _weir_memory import MemoryWriter  # noqa: E402
from _weir_metrics import Metrics  # noqa: E402
from _weir_response_sender import ResponseChannel, ResponsePacker  # noqa: E402

sys.path[:] = _PATH

RESCHEDULED = 0
"""In the place of the answer to a request that is to run again."""


class _ModelFault(Exception):
    """What a model did against the contract; its text is the message, there is no user's frame to show."""


class Stub:
    """The model's host: answers the worker's questions, one at a time, in the main thread."""

    def __init__(
        self,
        where: list[str],
        channel: Channel,
        inputs: InputMemory,
        outputs: MemoryWriter,
        responses: ResponseChannel,
        metrics: Metrics,
        lifeline: Lifeline,
    ) -> None:
        self._folder, self._version, self._filename = where
        self._channel = channel
        self._inputs = inputs
        self._packer = ResponsePacker(outputs)
        self._responses = responses
        self._calls = metrics.calls
        self._metrics = metrics
        self._lifeline = lifeline
        self._coroutines = Coroutines()
        self._model: Any = None
        self._instance_name = ""
        self._output_names: list[str] = []

    def serve(self) -> None:
        """Answers until the worker says FINALIZE or is gone."""
        handlers = {
            Kind.INITIALIZE: self._initialize,
            Kind.AUTO_COMPLETE: self._auto_complete,
            Kind.EXECUTE: self._execute,
            Kind.LOG: self._configure_log,
            Kind.FINALIZE: self._finalize,
        }
        kind = None
        while kind != Kind.FINALIZE:
            try:
                kind, *arguments = self._channel.receive()
            except (EOFError, OSError):
                return
            answer = self._answer(handlers[kind], arguments)
            self._inputs.detach()
            self._metrics.tell_gone()
            try:
                self._channel.send(*answer)
            except (TypeError, ValueError, OverflowError) as error:
                self._channel.send(Kind.FAILED, f"the answer can't be sent: {error}")

    def _answer(self, handler: Any, arguments: list[Any]) -> tuple[Kind, Any]:
        try:
            return Kind.DONE, handler(*arguments)
        except _ModelFault as fault:
            return Kind.FAILED, str(fault)
        except BaseException as error:  # noqa: BLE001  # user code: whatever it raises is the answer, as in Triton
            log_exception("the model raised an exception", error)
            return Kind.FAILED, self._describe(error)

    def _describe(self, error: BaseException) -> str:
        """The error and where it was raised, innermost call first, without the paths of this machine."""
        calls = [
            f"  {self._shown(frame.filename)}({frame.lineno}): {frame.name}\n"
            for frame in reversed(traceback.extract_tb(error.__traceback__))
            if not frame.filename.startswith((_HERE, "<frozen importlib"))
        ]
        text = "".join(traceback.format_exception_only(error)).rstrip("\n")
        # As Triton shows it: without the module that its class is of.
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
            raise _ModelFault(f"Python model file not found in '{place}'")
        pb_utils.ModelDirectory.path = version_folder
        sys.path[:0] = [version_folder, self._folder]
        # As a member of the version's folder, as Triton does it, so that relative imports work.
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
            raise _ModelFault("TritonPythonModel has no method 'execute'")
        self._calls.controls_models = True
        if hasattr(model, "initialize"):
            self._coroutines.awaited(model.initialize(arguments))
        self._model = model
        self._calls.is_allowed = True
        asks = hasattr(model, "is_ready")
        if asks:
            self._lifeline.answer_by(self._is_ready)
        return asks

    def _auto_complete(self, config: str) -> str:
        model = self._load()
        if not hasattr(model, "auto_complete_config"):
            return config
        completed = model.auto_complete_config(pb_utils.ModelConfig(config))
        if not isinstance(completed, pb_utils.ModelConfig):
            name = json.loads(config).get("name", "")
            raise _ModelFault(
                f"auto_complete_config function in model '{name}' must return a valid pb.ModelConfig object."
            )
        return json.dumps(completed.as_dict())

    def _is_ready(self) -> bool:
        """What the model says; asked while `execute` may be running, in another thread."""
        try:
            ready = self._coroutines.awaited_elsewhere(self._model.is_ready())
            if not isinstance(ready, bool):
                raise _ModelFault(f"is_ready must return a bool, found type '{type(ready)}'.")
            return ready
        except BaseException as error:  # noqa: BLE001  # user code: whatever it raises, it did not say yes
            log_exception("the model's is_ready raised an exception", error)
            return False

    def _finalize(self) -> None:
        self._calls.is_allowed = self._calls.controls_models = False
        if hasattr(self._model, "finalize"):
            self._coroutines.awaited(self._model.finalize())

    def _execute(self, run: int, rows: tuple[Any, ...]) -> list[Any]:
        self._packer.rewind()
        answers: list[Any] = [None] * len(rows)
        requests: list[pb_utils.InferenceRequest] = []
        places: list[int] = []
        for place, row in enumerate(rows):
            try:
                requests.append(self._request(row, (run, place)))
                places.append(place)
            except (OSError, ValueError) as error:
                # A segment goes with its owner: that is this request's loss, not its neighbours'.
                reason = error.strerror if isinstance(error, OSError) else error
                message = f"failed to read an input from shared memory: {reason}"
                answers[place] = (pb_utils.TritonError.INTERNAL, message)
        if requests:
            try:
                # The model gets a list of its own, which it may change.
                if self._responses.is_decoupled:
                    returned = self._run_decoupled(run, requests)
                else:
                    returned = self._run(requests)
            except BaseException:
                _close(requests)
                raise
            for place, answer in zip(places, returned, strict=True):
                answers[place] = answer
        return answers

    def _request(self, row: tuple[Any, ...], place: tuple[int, int]) -> pb_utils.InferenceRequest:
        *facts, outputs, inputs = row
        tensors = [
            pb_utils.Tensor.received(
                name, datatype, shape, content if isinstance(content, bytes) else self._inputs.array(content)
            )
            for name, datatype, shape, content in inputs
        ]
        wanted = outputs or self._output_names
        return pb_utils.InferenceRequest.received(*facts, wanted, tensors, self._responses, place)

    def _run(self, asked: list[pb_utils.InferenceRequest]) -> list[Any]:
        """The packed answer to each request; None where its response sender has sent it, or will."""
        returned = self._coroutines.awaited(self._model.execute(list(asked)))
        responses = [None] * len(asked) if returned is None else returned
        if not isinstance(responses, list):
            raise _ModelFault(f"Expected a list in the execute return, found type '{type(responses)}'.")
        if len(responses) != len(asked):
            raise _ModelFault(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(asked)}, and InferenceResponse(s) size is:{len(responses)}\n"
            )
        answers: list[Any] = []
        for request, response in zip(asked, responses, strict=True):
            if request.is_rescheduled():
                if response is not None:
                    raise _ModelFault(
                        "Expected a None object in the execute function return list for reschduled request, "
                        f"found type '{type(response)}'."
                    )
                request.close()
                answers.append(RESCHEDULED)
            elif isinstance(response, pb_utils.InferenceResponse):
                request.returned()
                answers.append(self._packer.packed(response, request.requested_output_names()))
            elif response is not None:
                raise _ModelFault(
                    "Expected an 'InferenceResponse' object in the execute function return list, "
                    f"found type '{type(response)}'."
                )
            elif request.has_sender():
                answers.append(None)
            else:
                # Nobody could still answer it.
                answers.append((pb_utils.TritonError.INTERNAL, "expected a single response, got 0"))
        return answers

    def _run_decoupled(self, run: int, asked: list[pb_utils.InferenceRequest]) -> list[Any]:
        """RESCHEDULED for each request that is to run again; None for the others, which their senders answer."""
        returned = self._model.execute(list(asked))
        if isinstance(returned, types.CoroutineType):
            self._coroutines.start(returned, lambda error: self._run_failed(run, asked, error))
        elif returned is not None:
            raise _ModelFault(
                f"Python model '{self._instance_name}' is using the decoupled mode and the execute function must "
                "return None."
            )
        rescheduled = [request for request in asked if request.is_rescheduled()]
        _close(rescheduled)
        return [RESCHEDULED if request in rescheduled else None for request in asked]

    def _run_failed(self, run: int, requests: list[pb_utils.InferenceRequest], error: BaseException) -> None:
        log_exception("a coroutine of the model raised an exception", error)
        _close(requests)
        self._responses.ask(Kind.RUN_FAILED, run, self._describe(error))


def _close(requests: list[pb_utils.InferenceRequest]) -> None:
    for request in requests:
        request.close()


def main() -> None:
    """Serves one model until told to stop."""
    # A model sees the arguments of an interpreter that is embedded in a server: none.
    arguments, sys.argv = sys.argv[1:], [""]
    fds = [int(argument) for argument in arguments[:10]]
    channel_fd, lifeline_fd, inputs_fd, outputs_fd, response_channel_fd, responses_fd, call_channel_fd, *memories = fds
    calls_fd, metrics_fd, _ = memories
    lifeline = Lifeline(socket.socket(fileno=lifeline_fd))
    faulthandler.enable()
    log_exceptions_of_threads()
    for fd in fds:
        os.set_inheritable(fd, False)
    channel = Channel(socket.socket(fileno=channel_fd))
    response_channel = Channel(socket.socket(fileno=response_channel_fd))
    call_channel = Channel(socket.socket(fileno=call_channel_fd))
    # A process the model forks must not keep the channels open after this one has died.
    for open_channel in (channel, response_channel, call_channel):
        os.register_at_fork(after_in_child=open_channel.close)
    os.register_at_fork(after_in_child=lifeline.close_after_fork)
    # Compiled files would appear in the model repository, whose changes mean something.
    sys.dont_write_bytecode = True
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    responses = ResponseChannel(response_channel, MemoryWriter(responses_fd))
    calls = Calls.current = Calls(call_channel, MemoryWriter(calls_fd))
    metrics = Metrics.current = Metrics(calls, metrics_fd)
    Stub(
        arguments[10:13], channel, InputMemory(inputs_fd), MemoryWriter(outputs_fd), responses, metrics, lifeline
    ).serve()


if __name__ == "__main__":
    main()

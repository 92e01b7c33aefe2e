"""The interface of a backend: how models of one kind are described, loaded and run.

A backend is a class of the shape `Backend`. The worker calls `load` once for a model version, then `create_instance` once
for each instance, in the thread in which that instance will run. On a GPU a backend implements `DeviceRunner` instead of
`Instance`: copies to and from the device, the order of streams and the accounting of memory are the same for all backends
(`weir.worker.cuda`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from weir.bus.payloads.arena import PayloadReader
from weir.repository.completion import DescribedModel
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor
from weir.worker.backend_api.custom_metrics import LoadMetrics, ModelMetrics
from weir.worker.backend_api.version_health import VersionHealth
from weir.worker.devices.cuda_shared_memory import MappedRegion
from weir.worker.devices.gpus import WorkerDevices
from weir.worker.devices.host_policy import UNBOUND, HostPolicy


class CallConnection(Protocol):
    """The calls of one process of a model."""

    def close(self) -> None:
        """Cancels the open calls: the process has ended. For any thread."""


class ProcessCalls(Protocol):
    """Serves what the processes of models ask of their worker: inference by other models, and model control."""

    @property
    def metrics(self) -> ModelMetrics:
        """The custom metrics of models."""

    def connect(
        self, end: socket.socket, memory_fd: int, name: str, metrics: LoadMetrics | None = None, key: str = ""
    ) -> CallConnection:
        """Serves the calls that arrive at `end`, with large tensors in `memory_fd`. For any thread.

        The connection owns both, and closes them. `name` is the instance's, `key` identifies it in `has_open_calls` (by
        default its name), and `metrics` are those of its loaded version.
        """

    def has_open_calls(self, key: str) -> bool:
        """Whether the process of this instance waits for other models. Only in the event loop."""


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One version of a model to be loaded. `model_directory` holds the numbered version folders.

    `calls` serves the requests of the model's own processes to other models, None where they may send none. `settings`
    are those of its backend from the command line (`--backend-config`). A backend reports to `health` which instances
    can't run for a while. `own_gpus` are the GPUs on which this worker runs instances.
    """

    name: str
    version: int
    model_directory: Path
    config: ModelConfig
    calls: ProcessCalls | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    health: VersionHealth = field(default_factory=VersionHealth, compare=False)
    own_gpus: Sequence[int] = ()

    @property
    def directory(self) -> Path:
        """The folder of this version."""
        return self.model_directory / str(self.version)


@dataclass(frozen=True, slots=True)
class InstanceDevice:
    """Where an instance runs: `kind` as in `instance_group` ("KIND_CPU"), `device_id` of a GPU, and the instance's name.

    `profiles` are the optimization profiles of its group (TensorRT). `host_policy` is applied to its thread before the
    instance is created in it. Instances on different GPUs may have the same name, and so may, during an update in place,
    an instance and its successor: `unique_name` distinguishes them within the worker, "" where the name is unique.
    """

    kind: str
    device_id: int
    name: str
    host_policy: HostPolicy = UNBOUND
    profiles: tuple[str, ...] = ()
    unique_name: str = ""

    @property
    def key(self) -> str:
        """Identifies the instance within the worker."""
        return self.unique_name or self.name


_NO_REGIONS: Mapping[tuple[int, str], MappedRegion] = {}


class Execution:
    """One run of a batch: what the instance needs besides the requests, and when its phases ended.

    `reader` resolves payload references. Times are `time.monotonic_ns()`. For requests whose result `execute` does not
    return, the instance calls `respond` or `fail`, from any thread, during `execute` or after it. A response to a request
    that has its final response is dropped. Positions are those of the requests given to `execute`.
    """

    __slots__ = ("infer_end_ns", "input_end_ns", "output_regions", "reader", "start_ns")

    output_regions: Mapping[tuple[int, str], MappedRegion]
    """Clients' memory on the instance's GPU that gets outputs, by position of the request and output."""

    def __init__(self, reader: PayloadReader) -> None:
        self.reader = reader
        self.output_regions = _NO_REGIONS
        self.start_ns = time.monotonic_ns()
        self.input_end_ns = self.start_ns
        self.infer_end_ns = self.start_ns

    def input_ready(self) -> None:
        """Records that the batch's inputs are where the model reads them."""
        self.input_end_ns = time.monotonic_ns()

    def inferred(self) -> None:
        """Records that the model has run."""
        self.infer_end_ns = time.monotonic_ns()

    def respond(self, position: int, result: Result | None, is_final: bool) -> None:
        """Sends a response at once; `is_final` marks the last one, which may have no result (None).

        A response that can't be sent ends its request with an error. Outputs may be views that are valid only until this
        returns.
        """
        raise NotImplementedError

    def fail(self, error: WeirError) -> None:
        """Ends every request that has no final response with `error`."""
        raise NotImplementedError

    def is_cancelled(self, position: int) -> bool:
        """Whether the client has cancelled the request."""
        return False

    @property
    def has_responded(self) -> bool:
        """Whether `respond` was called."""
        return False

    def may_run_again(self, position: int) -> bool:
        """Whether a failed request may run again: it is not cancelled, and its client has no response to it."""
        return False

    def has_run_alone(self, position: int, run: Execution) -> None:
        """Records that the request ran again by itself, in `run`, which statistics count as one more execution."""


class InstanceDied(Exception):
    """The instance can't continue and has responded to no request of the batch, which another instance must run."""


class InstanceUnavailable(InstanceDied):
    """The instance can't run anything for now, and has not started the batch."""


class DeviceLost(InstanceDied):
    """Nothing can run on the device in this process any more: the worker must be restarted."""


@dataclass(slots=True, eq=False)
class Result:
    """One request's outcome: outputs and response parameters, or an error.

    `is_model_response`: the model itself responded to this request with the error, as opposed to a failure to run it.
    `states` are the request's rows of the outputs that the next request of its sequence gets as inputs, from backends that
    keep implicit states; their memory is not reused.
    """

    outputs: Sequence[Tensor] = ()
    parameters: dict[str, object] | None = None
    error: WeirError | None = None
    is_model_response: bool = False
    states: Sequence[Tensor] = ()


class _Rescheduled(Result):
    __slots__ = ()

    def __bool__(self) -> bool:
        return False


RESCHEDULED = _Rescheduled()
"""Stands in place of a result: the model wants the request to run again. Only iterative sequences allow that.

It is false, as None is: a batch has ended if all its results are true.
"""


def not_iterative() -> WeirError:
    """The error of a request that a model reschedules although its sequences are not iterative, in Triton's words."""
    return invalid(
        "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle "
        "such a flag."
    )


MAX_DEVICE_BATCHES = 2
"""Batches that an instance has on a device at a time: one that runs, and one that is copied; see `Instance.execute`."""


class ExecutionHandle:
    """A batch that a device is executing."""

    def results(self) -> Sequence[Result | None]:
        """Waits for the batch; returns and raises as `Instance.execute`. Called once, in the same thread.

        Outputs may be views that are valid only until the next call of `execute` after this.
        """
        raise NotImplementedError


class EndedRequest(NamedTuple):
    """A request of a microbatch that has run, from `start_ns` to `end_ns` (`time.monotonic_ns()`).

    `result` is as in the results of `Instance.execute`.
    """

    position: int
    result: Result | None
    start_ns: int
    end_ns: int


class MicrobatchRun(Protocol):
    """The requests of a microbatch, which an instance runs one after another, each alone.

    All methods belong to the instance's thread, except `withdraw` and `unstarted`. Results are valid until `close`.
    """

    death: str
    """Why the instance can't continue, "" as long as it can."""

    withdrawn: range
    """The positions that `withdraw` has returned."""

    @property
    def unstarted(self) -> int:
        """How many requests have not started. For any thread."""

    @property
    def lost(self) -> Sequence[int]:
        """The positions of the requests that were running when the instance died, after `wait` has returned True."""

    def wait(self, timeout_s: float | None) -> bool:
        """Whether the last request ends, or the instance dies, within `timeout_s` (None: no limit)."""

    def ended(self) -> Sequence[EndedRequest]:
        """The requests that have ended since the last call."""

    def withdraw(self) -> Sequence[int]:
        """Withdraws the requests that have not started; returns their positions. For any thread."""

    def close(self) -> None:
        """The results have been read: the instance may run the next batch."""


class Instance(Protocol):
    """One instance of a loaded model. All calls come from the thread that created it.

    With an attribute `region_gpu`, the number of a GPU, the instance copies clients' memory on that GPU itself: inputs may
    have a `MappedRegion` in place of their content, and `Execution.output_regions` has the places of outputs.
    """

    def execute(
        self, requests: Sequence[InferRequest], execution: Execution
    ) -> Sequence[Result | None] | ExecutionHandle:
        """Runs the requests as one batch; one result for each, in order.

        Where a device runs the batch, this returns an `ExecutionHandle`. `execute` may then be called once more before the
        results of the first are read; results are read in the order of the calls. At most two batches are open.

        None stands for a request to which the instance responds through `execution`, perhaps later; the instance may then
        get the next batch while this one is still open. After an exception other than `InstanceDied` each request of the
        batch that may run again is run again by itself (`IndividualRetry`); the others without a final response fail with
        it. Outputs may be views that are valid only until the next call.
        """

    def close(self) -> None:
        """Releases what the instance holds."""


@runtime_checkable
class MicrobatchInstance(Instance, Protocol):
    """An instance for which one message with the requests of a microbatch is cheaper than a call for each."""

    def start_microbatch(self, requests: Sequence[InferRequest], execution: Execution) -> MicrobatchRun:
        """Starts to run `requests` one after another, each as `execute` would run it alone. Raises as `execute`."""


class LoadedModel(Protocol):
    """One loaded model version.

    With an attribute `starts_in_parallel` that is true, several threads may create instances of it at the same time.
    Without it they are created one after another. `is_isolated`: its instances run in processes of their own.
    `runs_in_any_thread`: an instance on a CPU may run a batch in another thread than its own, one batch at a time.
    """

    def create_instance(self, device: InstanceDevice) -> Instance:
        """Creates an instance. Raises WeirError with the reason when it can't."""

    def unload(self) -> None:
        """Releases what all instances share; called after they are closed."""


class Availability(NamedTuple):
    """Whether a backend can run models here: `runs_on` are kinds of instances, `problems` are why not the others.

    `formats` are the files that it loads, `version` is that of its library, "" where that is not installed.
    """

    runs_on: Sequence[str]
    formats: Sequence[str] = ()
    version: str = ""
    problems: Sequence[str] = ()


def installed_version(*packages: str) -> str:
    """The version of the first of these packages that is installed, "" if none is. Imports none of them."""
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return ""


class VersionLoader(Protocol):
    """Loads versions of models."""

    def load(self, model: ModelVersion) -> LoadedModel:
        """Loads a model version. Raises WeirError with the reason when it can't."""


class Backend(VersionLoader, Protocol):
    """One kind of models. Creating a backend imports no library of it: `load` does."""

    def availability(self, devices: WorkerDevices) -> Availability:
        """What it can run on a machine with these devices. It loads nothing that could crash the process."""

    def describe(self, model: ModelVersion) -> DescribedModel | ModelConfig | None:
        """What the model file contains for completing the model's configuration.

        The inputs and outputs, or the configuration as the model completed it; None where the file does not describe them.
        """


class DeviceTensor(NamedTuple):
    """A contiguous tensor in the memory of one GPU; `pointer` is the address of its first byte.

    `datatype` is Triton's (`weir.schemas.core.tensors`). The memory is not reused while `owner` exists.
    """

    datatype: str
    shape: tuple[int, ...]
    pointer: int
    owner: object = None


class InstanceStream(Protocol):
    """The CUDA stream of one instance."""

    device_id: int
    """Ordinal of the GPU."""

    handle: int
    """The `cudaStream_t` as an integer, never 0, for every library that takes one."""

    def allocate(self, size_bytes: int) -> DeviceMemory:
        """Device memory for work that is enqueued on this stream from now on. Raises WeirError (UNAVAILABLE) if full."""


class DeviceMemory(Protocol):
    """Memory of a GPU, freed with the last reference to it, after the work that its stream has been given."""

    pointer: int
    size_bytes: int


class DeviceRunner(Protocol):
    """One instance of a model on a GPU. All calls come from the thread of the instance.

    `host_inputs` are the inputs that it takes as arrays on the host: strings, and shape tensors. `can_capture`: `enqueue`
    may be recorded as a CUDA graph. For inputs of the same shapes at the same addresses it then enqueues the same work,
    waits for nothing, and has its outputs in memory of `InstanceStream.allocate` or of its own.

    A runner that later calls of `enqueue` change in ways that a recorded graph depends on has a method `for_graph`, which
    returns a runner of its own for one graph.
    """

    host_inputs: Collection[str]
    can_capture: bool

    def enqueue(self, inputs: Mapping[str, DeviceTensor | np.ndarray]) -> Sequence[DeviceTensor | np.ndarray]:
        """Enqueues the model on the instance's stream; returns its outputs, in the order of the names it was given.

        Returns without waiting for the stream, where the library allows that: an output in device memory has its content
        once the stream has reached that point. Inputs are valid until then. Raises WeirError.
        """

    def close(self) -> None:
        """Releases what it holds."""

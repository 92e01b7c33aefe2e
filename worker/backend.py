"""What a backend is: how models of one kind are described, loaded and run.

A backend is one file in `worker/backends`, a class of the shape `Backend`. The worker calls `load` once for a model
version, then `create_instance` once for each instance, in the thread in which that instance will run.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from bus.payloads import PayloadReader
from repository.completion import DescribedModel
from schemas.errors import WeirError, invalid
from schemas.model_config import ModelConfig
from schemas.requests import InferRequest
from schemas.tensors import Tensor
from worker.devices import WorkerDevices
from worker.host_policy import UNBOUND, HostPolicy
from worker.model_metrics import LoadMetrics, ModelMetrics
from worker.version_health import VersionHealth


class CallConnection(Protocol):
    """The calls of one process of a model."""

    def close(self) -> None:
        """The process has ended: what it waits for is given up. For any thread."""


class ProcessCalls(Protocol):
    """Serves what the processes of models ask of their worker: other models, changes of the repository."""

    @property
    def metrics(self) -> ModelMetrics:
        """Those that models make themselves."""

    def connect(
        self, end: socket.socket, memory_fd: int, name: str, metrics: LoadMetrics | None = None, key: str = ""
    ) -> CallConnection:
        """Serves what comes at `end`, with large tensors in `memory_fd`; both are its own from now on. For any thread.

        `name` is the instance's, `key` what `is_asking` knows it by (its name where that is empty), and `metrics` are those
        of its loaded version.
        """

    def is_asking(self, key: str) -> bool:
        """Whether the process of the instance that is known by `key` waits for other models. In the event loop."""


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One version of a model to be loaded. `model_directory` holds the numbered version folders.

    `calls` is how processes of its own ask other models, None where they can't. `settings` are those of its backend from
    the command line (`--backend-config`). To `health` a backend tells which instances can't run for a while.
    """

    name: str
    version: int
    model_directory: Path
    config: ModelConfig
    calls: ProcessCalls | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    health: VersionHealth = field(default_factory=VersionHealth, compare=False)

    @property
    def directory(self) -> Path:
        """The version's own folder."""
        return self.model_directory / str(self.version)


@dataclass(frozen=True, slots=True)
class InstanceDevice:
    """Where an instance runs: `kind` as in `instance_group` ("KIND_CPU"), `device_id` of a GPU, and its name.

    `profiles` are the optimization profiles of its group (TensorRT). Its thread runs by `host_policy` when the instance is
    made in it. Others may have the same name: those on other GPUs, and after an update in place one that is on its way
    out; `unique_name` is what tells the instance from all others of its worker, "" for where there are none.
    """

    kind: str
    device_id: int
    name: str
    host_policy: HostPolicy = UNBOUND
    profiles: tuple[str, ...] = ()
    unique_name: str = ""

    @property
    def key(self) -> str:
        """What the worker knows the instance by."""
        return self.unique_name or self.name


class Execution:
    """One run of a batch: what the instance needs besides the requests, and when its phases ended.

    `reader` resolves payload references. Times are `time.monotonic_ns()`. Requests whose result `execute` does not return
    are answered by `respond` and `fail`, from any thread, during `execute` or after it; what comes for a request that has
    its last answer is dropped. Positions are those of the requests given to `execute`.
    """

    __slots__ = ("infer_end_ns", "input_end_ns", "reader", "start_ns")

    def __init__(self, reader: PayloadReader) -> None:
        self.reader = reader
        self.start_ns = time.monotonic_ns()
        self.input_end_ns = self.start_ns
        self.infer_end_ns = self.start_ns

    def input_ready(self) -> None:
        """The batch's inputs are where the model reads them."""
        self.input_end_ns = time.monotonic_ns()

    def inferred(self) -> None:
        """The model has run."""
        self.infer_end_ns = time.monotonic_ns()

    def respond(self, position: int, result: Result | None, is_final: bool) -> None:
        """Sends a response at once; `is_final` says that none follows, `result` None is that alone.

        Outputs may be views that stay valid only until this returns.
        """
        raise NotImplementedError

    def fail(self, error: WeirError) -> None:
        """Ends every request that has no last answer yet with `error`."""
        raise NotImplementedError

    def is_cancelled(self, position: int) -> bool:
        """Whether the request's caller has given up."""
        return False

    @property
    def has_responded(self) -> bool:
        """Whether `respond` was called."""
        return False

    def may_run_again(self, position: int) -> bool:
        """Whether a request whose run failed may be run anew: somebody waits for it, and has seen nothing of its answer."""
        return False

    def has_run_alone(self, position: int, run: Execution) -> None:
        """The request was run anew, in a `run` of its own, which counts as one more."""


class InstanceDied(Exception):
    """The instance can't go on and has answered none of the batch: the batch is to be done again by another."""


class InstanceDown(InstanceDied):
    """The instance can't run anything for the time being, and has not begun with the batch."""


class DeviceLost(InstanceDied):
    """Nothing can run on the device in this process any more: the worker has to be started anew."""


@dataclass(slots=True, eq=False)
class Result:
    """One request's outcome: outputs and response parameters, or an error.

    `is_model_response` says that the error is what the model answered to this request, not a failure to run it. `states`
    are the request's rows of the outputs that its sequence's next request takes in, of a backend that keeps implicit
    states; their memory stays as it is.
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
"""In the place of a result: the model wants the request to be run again, which only iterative sequences are.

False, as None is: a batch whose outcomes are all true has ended.
"""


def not_iterative() -> WeirError:
    """What a request fails with that a model reschedules whose sequences are not iterative."""
    return invalid(
        "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle "
        "such a flag."
    )


class Pending:
    """A batch that a device is working on."""

    def results(self) -> Sequence[Result | None]:
        """Waits until it is done; returns and raises as `Instance.execute`. Called once, in the same thread.

        Outputs may be views that stay valid only until the next call of `execute` after this.
        """
        raise NotImplementedError


class Instance(Protocol):
    """One instance of a loaded model. All calls come from the thread that created it."""

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None] | Pending:
        """Runs the requests as one batch; one result for each, in order.

        Where a device runs it meanwhile, a `Pending` of that: then `execute` may be called once more before its results
        are asked for, which happens in the order of the calls. Two at most are under way.

        None is for a request that is answered through `execution`, perhaps later: then the instance is given the next
        batch while this one is still open. After an exception other than `InstanceDied` each request of the batch that may
        be is given again, alone (`worker.one_by_one`); the others that have no last answer yet fail with it. Outputs may be
        views that stay valid only until the next call.
        """

    def close(self) -> None:
        """Gives up what the instance holds."""


class LoadedModel(Protocol):
    """One loaded model version.

    With an attribute `starts_in_parallel` that is true, several threads may create instances of it at a time. Without it
    they are created one after another.
    """

    def create_instance(self, device: InstanceDevice) -> Instance:
        """A new instance. Raises WeirError when it can't be made."""

    def unload(self) -> None:
        """Gives up what all instances share; called after they are closed."""


class Availability(NamedTuple):
    """Whether a backend can run models here: `runs_on` are kinds of instances, `problems` say why not the others.

    `formats` are the files it loads, `version` is that of the library behind it, "" where it is not installed.
    """

    runs_on: Sequence[str]
    formats: Sequence[str] = ()
    version: str = ""
    problems: Sequence[str] = ()


class VersionLoader(Protocol):
    """Whoever makes a loaded model of a version of one."""

    def load(self, model: ModelVersion) -> LoadedModel:
        """Loads a model version. Raises WeirError with the reason when it can't."""


class Backend(VersionLoader, Protocol):
    """One kind of models. Making one imports no library of the backend: that is for `load`."""

    def availability(self, devices: WorkerDevices) -> Availability:
        """What it can do on a machine with these devices. Loads nothing that could take the process along."""

    def describe(self, model: ModelVersion) -> DescribedModel | ModelConfig | None:
        """What the model itself tells for completing its configuration.

        Its inputs and outputs, or the configuration as the model completed it; None where it doesn't tell.
        """

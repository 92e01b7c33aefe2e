"""`run_backend`: runs a model by its backend in this process, for tests of a backend or of a model repository.

    with run_backend("models/prices", backend_directory="backends") as model:
        assert model.infer({"X": [[3, 80]]})["Y"].shape == (1, 1)

The model is loaded, and its batches run, by the code of a worker: completion of the configuration, instances in their
threads, batches, states, responses of decoupled models. Bus, scheduler and gateway are left out, so a test decides which
requests share a batch, and nothing is started that a test would have to wait for. Test what clients see with `weir.Server`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from weir.bus.payloads.arena import PayloadReader
from weir.repository.layout import ModelRepository
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError, internal, invalid
from weir.schemas.core.requests import InferRequest, RequestedOutput
from weir.schemas.core.tensors import BY_CONFIG_NAME, DATATYPES, PayloadRef, Tensor, as_array
from weir.schemas.wire.batches import BatchEnded, BatchEntry, BatchMessage, BatchReleased
from weir.schemas.wire.calls import ResponseEnvelope, unpack_responses
from weir.schemas.wire.request_body import pack_body
from weir.worker.backends.registry import BackendRegistry
from weir.worker.devices.gpus import WorkerDevices
from weir.worker.execution.batch import Batch
from weir.worker.execution.instance import ModelEnvironment, ModelInstance
from weir.worker.execution.updates import BatchUpdate
from weir.worker.lifecycle.loader import ModelLoader

__all__ = ["BackendRun", "run_backend"]

Inputs = Mapping[str, Any]
"""Arrays, or what `numpy.asarray` accepts, by the name of the input."""

Outputs = dict[str, np.ndarray]
"""Arrays by the name of the output; strings are `bytes` in arrays of objects."""

_CALLER = "gateway"


@contextlib.contextmanager
def run_backend(
    model: str | os.PathLike[str],
    *,
    backend_directory: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    backend_config: Sequence[str] = (),
    gpus: Sequence[int] = (),
    config: str | None = None,
) -> Iterator[BackendRun]:
    """Loads the model in folder `model` (`config.pbtxt` and numbered versions), and unloads it at the end of the context.

    `backend_directory` and `backend_config` are as the options of `weir serve`. `gpus` are those on which the model may
    run; by default it runs on the CPU. `config` replaces the model's configuration (JSON, as in a load request).

    Raises WeirError with the reason if the model can't be loaded.
    """
    folder = Path(model).resolve()
    single = isinstance(backend_directory, (str, os.PathLike))
    directories: Any = [backend_directory] if single else backend_directory
    updates: queue.SimpleQueue[BatchUpdate] = queue.SimpleQueue()
    environment = ModelEnvironment(
        arena_prefix=f"weir-test-{os.getpid()}-{secrets.token_hex(4)}",
        on_update=updates.put,
        devices=WorkerDevices(tuple(gpus), tuple(gpus)),
    )
    registry = BackendRegistry(backend_config, [Path(one).resolve() for one in directories])
    loader = ModelLoader(ModelRepository([folder.parent]), environment, registry)
    found = loader.look().models.get(folder.name)
    if found is None:
        raise invalid(f"there is no model folder '{folder.name}' in '{folder.parent.name}'")
    result = loader.load(found, config)
    if result.error is not None or result.config is None or not result.served:
        raise result.error or internal(result.reason or f"model '{folder.name}' could not be loaded")
    try:
        served = result.served[max(result.served)]
        instances = [instance for instance in served.instances if isinstance(instance, ModelInstance)]
        if not instances:
            raise invalid(f"model '{folder.name}' has no instance that runs batches: it is an ensemble")
        yield BackendRun(result.config, max(result.served), instances, updates)
    finally:
        for version in result.served.values():
            version.unload()


class BackendRun:
    """A loaded model: `config` is its completed configuration, `version` the one that runs.

    Batches run on `instances` in turn.
    """

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        instances: Sequence[ModelInstance],
        updates: queue.SimpleQueue[BatchUpdate],
    ) -> None:
        self.config = config
        self.version = version
        self.instances = instances
        self._updates = updates
        self._reader = PayloadReader()
        self._numbers = count(1)
        self._turns = count()

    def infer(self, inputs: Inputs, outputs: Sequence[str] = ()) -> Outputs:
        """Runs one request; its outputs, or those named. Raises WeirError if it fails."""
        (outcome,) = self.batch(inputs, outputs=outputs)
        if isinstance(outcome, WeirError):
            raise outcome
        return outcome

    def batch(
        self, *requests: Inputs, outputs: Sequence[str] = (), timeout_s: float = 60.0
    ) -> list[Outputs | WeirError]:
        """Runs requests as one batch; the outcome of each, in order: its outputs, or its error.

        Raises TimeoutError if the batch does not end in time, and WeirError if a request has no outcome: its instance died,
        or the model is decoupled and sent another number of responses than one.
        """
        found: list[Outputs | WeirError] = []
        for responses in self._run(requests, outputs, timeout_s):
            answered = [response for response in responses if response is not None]
            if len(answered) != 1:
                raise internal(f"a request has {len(answered)} responses: use `stream` for decoupled models")
            found += answered
        return found

    def stream(self, inputs: Inputs, outputs: Sequence[str] = (), timeout_s: float = 60.0) -> list[Outputs]:
        """All responses of a decoupled model to one request. Raises WeirError if one of them is an error."""
        (responses,) = self._run([inputs], outputs, timeout_s)
        found: list[Outputs] = []
        for response in responses:
            if isinstance(response, WeirError):
                raise response
            if response is not None:
                found.append(response)
        return found

    def streams(self, *requests: Inputs, timeout_s: float = 60.0) -> list[list[Outputs | WeirError]]:
        """As `stream`, for requests that share a batch; an error is the last response of its request."""
        return [[one for one in responses if one is not None] for responses in self._run(requests, (), timeout_s)]

    def batches(
        self, *batches: Sequence[Inputs], outputs: Sequence[str] = (), timeout_s: float = 60.0
    ) -> list[list[Outputs | WeirError]]:
        """As `batch`, for batches that are submitted together to one instance: on a GPU two of them overlap."""
        found = self._run_all(batches, outputs, timeout_s)
        return [[one for responses in batch for one in responses if one is not None] for batch in found]

    def _run(
        self, requests: Sequence[Inputs], outputs: Sequence[str], timeout_s: float
    ) -> list[list[Outputs | WeirError | None]]:
        (received,) = self._run_all([requests], outputs, timeout_s)
        return received

    def _run_all(
        self, batches: Sequence[Sequence[Inputs]], outputs: Sequence[str], timeout_s: float
    ) -> list[list[list[Outputs | WeirError | None]]]:
        """The responses to each request of each batch, None for the end of a decoupled model's."""
        instance = self.instances[next(self._turns) % len(self.instances)]
        messages: list[BatchMessage] = []
        received: dict[int, list[Outputs | WeirError | None]] = {}
        unended: set[int] = set()
        for requests in batches:
            keys = [next(self._numbers) for _ in requests]
            entries = [
                BatchEntry(_CALLER, key, 0, pack_body(self._request(inputs, outputs)), 0)
                for key, inputs in zip(keys, requests, strict=True)
            ]
            received |= {key: [] for key in keys}
            unended.add(number := next(self._numbers))
            messages.append(BatchMessage("test", number, self.config.name, self.version, 0, entries))
        for message in messages:
            instance.submit(Batch(message))
        open_requests = set(received)
        while open_requests or unended:
            try:
                update = self._updates.get(timeout=timeout_s)
            except queue.Empty:
                raise TimeoutError(f"the batch did not end within {timeout_s} s") from None
            for _, data in update.responses:
                for row in unpack_responses(data)[1]:
                    received[row.key].append(self._outcome(row, instance))
                    if row.is_final:
                        open_requests.discard(row.key)
            unended -= _ended(update)
        return [[received[entry.key] for entry in message.entries] for message in messages]

    def _request(self, inputs: Inputs, outputs: Sequence[str]) -> InferRequest:
        declared = {row.name: BY_CONFIG_NAME[row.data_type].name for row in self.config.input}
        unknown = set(inputs) - set(declared)
        if unknown:
            raise invalid(
                f"model '{self.config.name}' has no input '{min(unknown)}', its inputs are: {sorted(declared)}"
            )
        tensors = [
            Tensor.from_numpy(name, _array(value, declared[name]), declared[name]) for name, value in inputs.items()
        ]
        return InferRequest(
            self.config.name, str(self.version), inputs=tensors, outputs=[RequestedOutput(name) for name in outputs]
        )

    def _outcome(self, row: ResponseEnvelope, instance: ModelInstance) -> Outputs | WeirError | None:
        if row.error is not None:
            return row.error
        if row.outputs is None:
            return None
        return {tensor.name: self._content(tensor, instance) for tensor in row.outputs}

    def _content(self, tensor: Tensor, instance: ModelInstance) -> np.ndarray:
        data = tensor.data
        if not isinstance(data, PayloadRef):
            return as_array(bytes(data), tensor.datatype, tensor.shape)  # type: ignore[arg-type]
        content = bytes(self._reader.view(data))
        instance.release(data.segment, data.slot, data.generation)
        return as_array(content, tensor.datatype, tensor.shape)


def _array(value: Any, datatype: str) -> np.ndarray:
    if datatype == "BYTES":
        given = np.asarray(value, dtype=object)
        flat = [one.encode() if isinstance(one, str) else bytes(one) for one in given.ravel()]
        array = np.empty(len(flat), dtype=object)
        array[:] = flat
        return array.reshape(given.shape)
    return np.asarray(value, DATATYPES[datatype].numpy)


def _ended(update: BatchUpdate) -> set[int]:
    """The ids of the batches that have ended, those whose responses are still to come left out."""
    ends = [completion for completion in update.completions if not isinstance(completion, BatchReleased)]
    for end in ends:
        if not isinstance(end, BatchEnded):
            raise internal(f"the batch was not answered ({type(end).__name__}): see the log")
    return {end.batch_id for end in ends}

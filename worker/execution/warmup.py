"""Warm-up: sample batches that an instance runs before its model is ready, so that no client pays for a slow first run.

Source: `model_warmup` of Triton's model configuration, and Triton 2.51 as it runs. A sample is a batch of equal requests of
one row each, which must be valid requests to the model. It may also have inputs that no client sends (sequence controls,
states). Samples run like other batches, but as padding: no response is sent, no sequence changes, nothing is counted.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from weir.repository.paths import MAX_TENSOR_FILE_BYTES, path_inside, read_small_file
from weir.repository.problems import ConfigProblem
from weir.schemas.config.model_config import ModelWarmup, WarmupInput
from weir.schemas.core.errors import WeirError, internal, invalid, unavailable
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import BY_CONFIG_NAME, Datatype, Tensor
from weir.schemas.kserve.normalizer import RequestNormalizer
from weir.schemas.wire.batches import NO_REPLY, BatchEnded, BatchEntry, BatchMessage
from weir.schemas.wire.request_body import pack_body
from weir.worker.backend_api.interface import (
    DeviceLost,
    Execution,
    ExecutionHandle,
    Instance,
    InstanceDied,
    ModelVersion,
    Result,
)
from weir.worker.execution.batch import Batch
from weir.worker.execution.updates import BatchUpdate

logger = logging.getLogger("weir.worker")

FOLDER = "warmup"
"""The folder of the samples' files inside a model's folder."""

RESPONSES_TIMEOUT_S = 120.0
"""How long a sample's last responses may take once the model's `execute` has returned."""

RunBatch = Callable[[Instance, Batch], BatchUpdate | None]
"""Runs a batch; returns None if its end is published later."""


class WarmUpSample(NamedTuple):
    """One sample, ready to be run `runs` times."""

    name: str
    runs: int
    message: BatchMessage


def warm_up_samples(model: ModelVersion) -> list[WarmUpSample]:
    """The samples of a model. Raises WeirError for one that is not a valid request, or whose file can't be read."""
    return [_sample(model, warmup) for warmup in model.config.model_warmup if warmup.batch_size]


def _sample(model: ModelVersion, warmup: ModelWarmup) -> WarmUpSample:
    config = model.config
    batch = [1] if config.max_batch_size > 0 else []
    request = InferRequest(model.name, str(model.version))
    added: list[Tensor] = []
    for name, source in warmup.inputs.items():
        tensor = _tensor(model, name, source, [*batch, *source.dims])
        (request.inputs if name in config.input_by_name else added).append(tensor)
    # A sample belongs to no sequence, which the normalizer would reject.
    RequestNormalizer(config.replace(sequence_batching=None)).normalize(request)
    request.inputs += added
    entry = BatchEntry(NO_REPLY, 0, 0, pack_body(request))
    message = BatchMessage("", 0, model.name, model.version, 0, [entry] * warmup.batch_size)
    return WarmUpSample(warmup.name, max(1, warmup.count), message)


def _tensor(model: ModelVersion, name: str, source: WarmupInput, shape: Sequence[int]) -> Tensor:
    datatype = BY_CONFIG_NAME[source.data_type]
    elements = prod(source.dims)
    size = elements * (datatype.size_bytes or 4)  # an empty string is its length, 0
    if source.input_data_file is not None:
        content = _file(model, source.input_data_file)
        if datatype.size_bytes:
            if len(content) < size:
                raise invalid(
                    f"[request id: <id_unknown>] warmup setting expects {size} bytes, but the data provided from "
                    f"{source.input_data_file} only has {len(content)} bytes"
                )
            content = content[:size]
        return Tensor(name, datatype.name, shape, content)
    can_be_random = source.random_data is not None and datatype.name != "BYTES"
    if source.zero_data is not None or not can_be_random:
        return Tensor(name, datatype.name, shape, bytes(size))
    return Tensor(name, datatype.name, shape, _random(datatype, elements))


def _random(datatype: Datatype, elements: int) -> bytes:
    """Random integers of any size, or floats from 0 to 1: random bytes would be huge floats or NaN."""
    generator = np.random.default_rng()
    if datatype.name == "BF16":
        return (generator.random(elements, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    if datatype.numpy.kind == "f":
        return generator.random(elements).astype(datatype.numpy).tobytes()
    if datatype.name == "BOOL":
        return generator.integers(0, 2, elements, np.uint8).tobytes()
    return generator.bytes(elements * datatype.size_bytes)


def _file(model: ModelVersion, filename: str) -> bytes:
    try:
        path = path_inside(model.model_directory, f"{FOLDER}/{filename}")
        return read_small_file(path, MAX_TENSOR_FILE_BYTES)
    except ConfigProblem as problem:
        raise invalid(problem.message) from problem
    except OSError as error:
        shown = f"{model.name}/{FOLDER}/{filename}"
        raise internal(f"failed to open text file for read {shown}: {error.strerror}") from error


class WarmUp:
    """The warm-up of one instance, called `instance_name`.

    `published` gets the updates that its batches publish after their run, and `failures` the errors of all responses.
    """

    def __init__(self, samples: Sequence[WarmUpSample], instance_name: str) -> None:
        self._samples = samples
        self._instance_name = instance_name
        self.published: queue.SimpleQueue[BatchUpdate] = queue.SimpleQueue()
        self.failures: list[str] = []

    def run(self, instance: Instance, run_batch: RunBatch) -> None:
        """Runs all samples. Raises WeirError (INVALID_ARG, in Triton's words) at the first that fails, or DeviceLost."""
        observed = _ObservedInstance(instance, self.failures)
        for sample in self._samples:
            for iteration in range(sample.runs):
                logger.debug(
                    "model '%s' instance %s is running warmup sample '%s' for iteration %d",
                    sample.message.model,
                    self._instance_name,
                    sample.name,
                    iteration + 1,
                )
                self._run_once(observed, run_batch, sample.message)
                if observed.lost is not None:
                    raise observed.lost
                if self.failures:
                    failures = "".join(f"{failure}; " for failure in self.failures)
                    raise invalid(f"failed to run warmup sample '{sample.name}': {failures}")

    def _run_once(self, observed: _ObservedInstance, run_batch: RunBatch, message: BatchMessage) -> None:
        observed.has_run = False
        update = run_batch(observed, Batch(message))
        if not observed.has_run:
            self.failures.append("it could not be run")  # the log has the reason
            return
        deadline_s = time.monotonic() + RESPONSES_TIMEOUT_S
        while update is None or not any(isinstance(each, BatchEnded) for each in update.completions):
            try:
                update = self.published.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                self.failures.append(f"its responses did not end within {RESPONSES_TIMEOUT_S:g} s")
                return


class _ObservedInstance:
    """An `Instance` that records the failures of the instance it wraps."""

    def __init__(self, instance: Instance, failures: list[str]) -> None:
        self._instance = instance
        self._failures = failures
        self.has_run = False
        self.lost: DeviceLost | None = None

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
        self.has_run = True
        for request in requests:
            # Inputs of the sample come first; those of the same name that were added later are dropped.
            first = {tensor.name: tensor for tensor in reversed(request.inputs)}
            request.inputs = [tensor for tensor in request.inputs if first[tensor.name] is tensor]
        try:
            results = self._instance.execute(requests, execution)
            if isinstance(results, ExecutionHandle):
                results = results.results()
        except InstanceDied as death:
            self._note(str(death), len(requests))
            self.lost = death if isinstance(death, DeviceLost) else None
            raise unavailable(str(death)) from death  # it does not run again
        except WeirError as error:
            self._note(error.message, len(requests))
            raise
        except Exception as error:
            self._note(f"{type(error).__name__}: {error}", len(requests))
            raise
        for result in results:
            if result is not None and result.error is not None:
                self._note(result.error.message, 1)
        return results

    def close(self) -> None:
        self._instance.close()

    def _note(self, failure: str, times: int) -> None:
        # Once for each request, as in Triton, where each gets a response of its own.
        self._failures += [failure] * times

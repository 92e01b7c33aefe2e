"""Warm-up: what an instance runs before the model is ready, so that no client waits for what a first run costs.

Source: `model_warmup` of Triton's model configuration, and Triton 2.51 as it runs. A sample is a batch of requests of one
row each, all alike; they are held to what the model asks of any request. Inputs that no client sends (sequence controls,
states) may be given too. Samples take the way of ordinary batches through their instance, as null rows: nobody is
answered, no sequence is touched and nothing is counted.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from repository.paths import path_inside
from repository.problem import ConfigProblem
from repository.small_files import MAX_TENSOR_FILE_BYTES, read_small_file
from schemas.bodies import pack_body
from schemas.datatypes import BY_CONFIG_NAME, Datatype
from schemas.errors import WeirError, internal, invalid, unavailable
from schemas.messages import NOBODY, BatchEntry, BatchMessage, BatchOutcome
from schemas.model_config import ModelWarmup, WarmupInput
from schemas.normalizer import RequestNormalizer
from schemas.requests import InferRequest
from schemas.tensors import Tensor
from worker.backend import DeviceLost, Execution, Instance, InstanceDied, ModelVersion, Pending, Result
from worker.batch_execution import FinishedBatch
from worker.running_batch import RunningBatch

logger = logging.getLogger("weir.worker")

FOLDER = "warmup"
"""Where, in a model's folder, the files of samples lie."""

PATIENCE_S = 120.0
"""How long a sample's last responses may take once the model's `execute` has returned."""

Attempt = Callable[[Instance, RunningBatch], FinishedBatch | None]
"""Runs a batch; None when its end is told later."""


class WarmUpSample(NamedTuple):
    """One sample, ready to be run `runs` times."""

    name: str
    runs: int
    message: BatchMessage


def warm_up_samples(model: ModelVersion) -> list[WarmUpSample]:
    """The samples of a model. Raises WeirError for one that is no request to the model, or whose file is not there."""
    return [_sample(model, warmup) for warmup in model.config.model_warmup if warmup.batch_size]


def _sample(model: ModelVersion, warmup: ModelWarmup) -> WarmUpSample:
    config = model.config
    batch = [1] if config.max_batch_size > 0 else []
    request = InferRequest(model.name, str(model.version))
    made: list[Tensor] = []
    for name, source in warmup.inputs.items():
        tensor = _tensor(model, name, source, [*batch, *source.dims])
        (request.inputs if name in config.input_by_name else made).append(tensor)
    # A sample belongs to no sequence, which is all that the normaliser would miss.
    RequestNormalizer(config.replace(sequence_batching=None)).normalize(request)
    request.inputs += made
    entry = BatchEntry(NOBODY, 0, 0, pack_body(request))
    message = BatchMessage("", 0, model.name, model.version, 0, [entry] * warmup.batch_size, [])
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
    """Integers of any size; fractions between 0 and 1, for any bytes would make most of them huge, and some NaN."""
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

    While it goes on, `published` gets what leaves batches after their `Attempt`, and `failures` the errors among it.
    """

    def __init__(self, samples: Sequence[WarmUpSample], instance_name: str) -> None:
        self._samples = samples
        self._instance_name = instance_name
        self.published: queue.SimpleQueue[FinishedBatch] = queue.SimpleQueue()
        self.failures: list[str] = []

    def run(self, instance: Instance, attempt: Attempt) -> None:
        """Runs all samples. Raises WeirError (INVALID_ARG, in Triton's words) at the first that fails, or DeviceLost."""
        rehearsal = _Rehearsal(instance, self.failures)
        for sample in self._samples:
            for iteration in range(sample.runs):
                logger.debug(
                    "model '%s' instance %s is running warmup sample '%s' for iteration %d",
                    sample.message.model,
                    self._instance_name,
                    sample.name,
                    iteration + 1,
                )
                self._run_once(rehearsal, attempt, sample.message)
                if rehearsal.lost is not None:
                    raise rehearsal.lost
                if self.failures:
                    told = "".join(f"{failure}; " for failure in self.failures)
                    raise invalid(f"failed to run warmup sample '{sample.name}': {told}")

    def _run_once(self, rehearsal: _Rehearsal, attempt: Attempt, message: BatchMessage) -> None:
        rehearsal.has_run = False
        finished = attempt(rehearsal, RunningBatch(message))
        if not rehearsal.has_run:
            self.failures.append("it could not be run")  # the log tells why
            return
        deadline_s = time.monotonic() + PATIENCE_S
        while finished is None or finished.done is None or finished.done.outcome == BatchOutcome.RELEASED:
            try:
                finished = self.published.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                self.failures.append(f"its responses did not end within {PATIENCE_S:g} s")
                return


class _Rehearsal:
    """An instance that notes what goes wrong in it. See `worker.backend.Instance`."""

    def __init__(self, instance: Instance, failures: list[str]) -> None:
        self._instance = instance
        self._failures = failures
        self.has_run = False
        self.lost: DeviceLost | None = None

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None]:
        self.has_run = True
        for request in requests:
            # What the sample gives stands first, before what was added on the way here.
            first = {tensor.name: tensor for tensor in reversed(request.inputs)}
            request.inputs = [tensor for tensor in request.inputs if first[tensor.name] is tensor]
        try:
            results = self._instance.execute(requests, execution)
            if isinstance(results, Pending):
                results = results.results()
        except InstanceDied as death:
            self._note(str(death), len(requests))
            self.lost = death if isinstance(death, DeviceLost) else None
            raise unavailable(str(death)) from death  # it is not done again
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

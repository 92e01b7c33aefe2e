"""Runs a model with made-up inputs, to find out what its file does not say: which dimensions are the batch, and which sizes
it takes.

Symbols in files are no proof: tools give each variable dimension a name of its own, or call one "batch" that the graph
fixes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from weir.bus.payloads.arena import PayloadReader
from weir.repository.completion import DescribedModel, DescribedTensor
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError, internal
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import DATATYPES, Tensor
from weir.schemas.kserve.sample_inputs import SampleInput, declared_inputs, sample_tensors
from weir.worker.backend_api.interface import (
    Backend,
    DeviceLost,
    Execution,
    ExecutionHandle,
    Instance,
    InstanceDevice,
    ModelVersion,
)

BATCH, OTHER = "batch", "other"
"""The symbols of first dimensions that are as long as the batch, and of other variable ones."""

_BATCHES = (2, 3)

_SIZES = ((8, 9), (32, 64), (224, 256))
"""Sizes of the other variable dimensions in the two runs: of tokens, of pictures that the model halves, of large ones."""


class Output(NamedTuple):
    """An output of a run: its name, its type in configurations, and its shape."""

    name: str
    data_type: str
    shape: tuple[int, ...]


Run = Callable[[Sequence[Tensor]], Sequence[Output]]
"""Runs the model once. Raises WeirError or DeviceLost."""


class Findings(NamedTuple):
    """The outputs of a run with the smaller sizes, with -1 for the sizes that another run had differently.

    `first_symbol` of each is `BATCH`, `OTHER`, or "" for a fixed first dimension. `size` is that of the other variable
    dimensions of inputs. `largest_batch` is 1 if the model takes no more, None if it took several rows.
    """

    outputs: Sequence[DescribedTensor]
    size: int
    largest_batch: int | None


def try_out(inputs: Sequence[SampleInput], run: Run) -> Findings:
    """Runs the model with two batches, or else with one row, in sizes that it takes. Raises the error of the first run."""
    first_error: WeirError | None = None
    for batches in (_BATCHES, (1, 1)):
        for sizes in _SIZES:
            try:
                first, second = (
                    run(sample_tensors(inputs, batch, variable_size=size))
                    for batch, size in zip(batches, sizes, strict=True)
                )
            except (WeirError, DeviceLost) as error:
                failure = error if isinstance(error, WeirError) else internal(str(error))
                first_error = first_error or failure
                continue
            outputs = _compared(first, second, batches)
            return Findings(outputs, sizes[0], None if batches is _BATCHES else 1)
    raise first_error or internal("the model was not run")


def _compared(first: Sequence[Output], second: Sequence[Output], batches: tuple[int, int]) -> list[DescribedTensor]:
    if [(row[:2], len(row.shape)) for row in first] != [(row[:2], len(row.shape)) for row in second]:
        raise internal("the model returns other outputs for other sizes of its inputs")
    found = []
    for one, other in zip(first, second, strict=True):
        dims = [size if size == changed else -1 for size, changed in zip(one.shape, other.shape, strict=True)]
        is_batch = (one.shape[:1], other.shape[:1]) == tuple((batch,) for batch in batches)
        symbol = BATCH if is_batch else OTHER if dims[:1] == [-1] else ""
        found.append(DescribedTensor(one.name, one.data_type, dims, symbol))
    return found


def tried(backend: Backend, model: ModelVersion, described: DescribedModel) -> DescribedModel:
    """`described` with the findings of runs on the CPU; as it is where the model could not be run.

    For a process of its own: the standard error is closed meanwhile.
    """
    if any(not tensor.dims for tensor in [*described.inputs, *described.outputs]):
        return described  # whole shapes without dimensions can't be configured
    config = model.config.replace(max_batch_size=0, input=_rows(described.inputs), output=_rows(described.outputs))
    try:
        with _without_stderr():
            findings = _run_in(backend, model, config, described)
    except WeirError:
        return described
    symbols = {row.name: row.first_symbol for row in findings.outputs}
    largest = described.largest_batch if findings.largest_batch is None else findings.largest_batch
    return described._replace(
        inputs=[_with_symbol(row, BATCH) for row in described.inputs],
        outputs=[_with_symbol(row, symbols.get(row.name, row.first_symbol)) for row in described.outputs],
        largest_batch=largest,
        tried_size=findings.size,
    )


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Suppresses what the libraries of models write there: that a model does not take a size is no error."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _rows(tensors: Sequence[DescribedTensor]) -> list[dict[str, object]]:
    return [{"name": row.name, "data_type": row.data_type, "dims": list(row.dims)} for row in tensors]


def _with_symbol(row: DescribedTensor, symbol: str) -> DescribedTensor:
    return row._replace(first_symbol=symbol if row.dims[0] == -1 else "")


def _run_in(backend: Backend, model: ModelVersion, config: ModelConfig, described: DescribedModel) -> Findings:
    version = ModelVersion(model.name, model.version, model.model_directory, config, settings=model.settings)
    loaded = backend.load(version)
    try:
        instance = loaded.create_instance(InstanceDevice("KIND_CPU", 0, f"{model.name}_0"))
        try:
            inputs = [row._replace(batches=described.can_batch) for row in declared_inputs(config)]
            return try_out(inputs, lambda tensors: _execute(instance, model.name, tensors))
        finally:
            instance.close()
    finally:
        loaded.unload()


def _execute(instance: Instance, name: str, tensors: Sequence[Tensor]) -> list[Output]:
    results = instance.execute([InferRequest(name, inputs=list(tensors))], Execution(PayloadReader()))
    if isinstance(results, ExecutionHandle):
        results = results.results()
    (result,) = results
    if result is None or result.error is not None:
        raise (result and result.error) or internal("the model did not respond")
    return [
        Output(tensor.name, DATATYPES[tensor.datatype].config_name, tuple(tensor.shape)) for tensor in result.outputs
    ]

"""`TorchTrial` describes PyTorch models whose files don't describe themselves, by running them twice.

TorchScript and packages of AOTInductor contain neither datatypes nor shapes. Given those of the inputs, a run shows
those of the outputs, and a second run with other sizes shows which dimensions are variable, and which of them is the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from repository.completion import DescribedModel, DescribedTensor
from schemas.core.errors import invalid
from schemas.kserve.sample_inputs import SampleInput, declared_inputs, sample_tensors
from worker.backend_api.interface import ModelVersion
from worker.backends.pytorch.backend import PyTorchBackend, open_program
from worker.backends.pytorch.library import TorchOptions, torch_library
from worker.backends.pytorch.programs import find_artifact
from worker.backends.pytorch.runner import TorchCall
from worker.backends.pytorch.tensors import TensorConverter

_TRIALS = ((2, 8), (3, 9))
"""(batch, other variable sizes) of each run."""

BATCH, OTHER = "batch", "other"
"""The symbols of first dimensions that are as long as the batch, and of other variable ones."""

_Result = tuple[str, str, tuple[int, ...]]


class TorchTrial(PyTorchBackend):
    """As the PyTorch backend, but it describes each format. Models run on the CPU."""

    def describe(self, model: ModelVersion) -> DescribedModel | None:
        """The inputs and outputs. Those formats that have no description need `input` in the configuration, with whole
        shapes, and `max_batch_size` 0.

        Raises WeirError (INVALID_ARG) if they are missing, or if the model can't be run with them.
        """
        described = super().describe(model)
        return described if described is not None else _describe(model)


def _describe(model: ModelVersion) -> DescribedModel:
    torch = torch_library()
    program = open_program(torch, find_artifact(model), "cpu", TorchOptions(), model)
    config = model.config
    if not config.input:
        names = ", ".join(argument.name for argument in program.signature.arguments) or program.signature.collects
        raise invalid(f"the file does not contain the datatypes and shapes of its inputs ({names})")
    call = TorchCall(torch, program, config, ())
    batches = all(tensor.dims[:1] == [-1] for tensor in config.input)
    inputs = [row._replace(batches=batches) for row in declared_inputs(config)]
    with torch.inference_mode():
        first, second = (_run(call, inputs, *sizes, torch) for sizes in _TRIALS)
    if [row[:2] for row in first] != [row[:2] for row in second]:
        raise invalid(
            "the model returns other outputs for other sizes of its inputs, so they can't be found by running it"
        )
    return DescribedModel(
        [DescribedTensor(row.name, f"TYPE_{row.datatype}", row.shape, BATCH if batches else "") for row in inputs],
        [_output(*pair) for pair in zip(first, second, strict=True)],
    )


def _run(call: TorchCall, inputs: Sequence[SampleInput], batch: int, variable: int, torch: Any) -> list[_Result]:
    """(name, type in configurations, shape) of each output."""
    tensors = sample_tensors(inputs, batch, variable_size=variable)
    names, values = call.run_all(
        {tensor.name: call.argument(tensor.name, tensor.to_numpy().copy()) for tensor in tensors}
    )
    converter = TensorConverter(torch, False)
    found: list[_Result] = []
    for place, value in enumerate(values):
        name = names[place] if place < len(names) else f"OUTPUT__{place}"
        kind = converter.config_type(value.dtype) if isinstance(value, torch.Tensor) else None
        if kind is None:
            shown = f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise invalid(f"output '{name}' of the model is {shown}, which a configuration can't describe")
        found.append((name, kind, tuple(value.shape)))
    return found


def _output(first: _Result, second: _Result) -> DescribedTensor:
    name, kind, shape = first
    if len(shape) != len(second[2]):
        raise invalid(f"output '{name}' of the model has other dimensions for other sizes of its inputs")
    dims = [size if size == other else -1 for size, other in zip(shape, second[2], strict=True)]
    is_batch = (shape[:1], second[2][:1]) == tuple((batch,) for batch, _ in _TRIALS)
    return DescribedTensor(name, kind, dims, BATCH if is_batch else OTHER if dims[:1] == [-1] else "")

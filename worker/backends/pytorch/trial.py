"""`TorchTrial` describes PyTorch models by running them on the CPU, also those whose files don't describe themselves.

TorchScript and packages of AOTInductor contain neither datatypes nor shapes. Given those of the inputs, runs show those of
the outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weir.repository.completion import DescribedModel, DescribedTensor
from weir.schemas.core.errors import invalid
from weir.schemas.core.tensors import Tensor
from weir.schemas.kserve.sample_inputs import declared_inputs
from weir.worker.backend_api.interface import ModelVersion
from weir.worker.backends.pytorch.backend import PyTorchBackend, open_program
from weir.worker.backends.pytorch.library import TorchOptions, torch_library
from weir.worker.backends.pytorch.programs import find_artifact
from weir.worker.backends.pytorch.runner import TorchCall
from weir.worker.backends.trial import BATCH, Output, tried, try_out


class TorchTrial(PyTorchBackend):
    """As the PyTorch backend, but it describes each format."""

    def describe(self, model: ModelVersion) -> DescribedModel | None:
        """The inputs and outputs. Those formats that have no description need `input` in the configuration, with whole
        shapes, and `max_batch_size` 0.

        Raises WeirError if they are missing, or if the model can't be run with them.
        """
        described = super().describe(model)
        return _describe(model) if described is None else tried(PyTorchBackend(), model, described)


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
        findings = try_out(inputs, lambda tensors: _run(call, tensors, torch))
    symbol = BATCH if batches else ""
    declared = [DescribedTensor(row.name, row.data_type, row.dims, symbol) for row in config.input]
    return DescribedModel(declared, findings.outputs, (), findings.largest_batch, findings.size)


def _run(call: TorchCall, tensors: Sequence[Tensor], torch: Any) -> list[Output]:
    arguments = {tensor.name: call.argument(tensor.name, tensor.to_numpy().copy()) for tensor in tensors}
    names, values = call.run_all(arguments)
    found: list[Output] = []
    for place, value in enumerate(values):
        name = names[place] if place < len(names) else f"OUTPUT__{place}"
        kind = call.converter.config_type(value.dtype) if isinstance(value, torch.Tensor) else None
        if kind is None:
            shown = f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise invalid(f"output '{name}' of the model is {shown}, which a configuration can't describe")
        found.append(Output(name, kind, tuple(value.shape)))
    return found

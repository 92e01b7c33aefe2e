"""`TorchCall`: one call of a PyTorch model, from inputs by name to outputs by name; `TorchRunner`: the same on arrays."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from schemas.datatypes import BY_CONFIG_NAME
from schemas.errors import WeirError, internal, invalid, unavailable
from schemas.model_config import ModelConfig
from worker.backend import DeviceLost
from worker.backends.pytorch_names import TENSOR, Argument, input_places, no_such_output, output_places
from worker.backends.pytorch_options import TorchOptions
from worker.backends.pytorch_programs import NotGiven, Program
from worker.backends.pytorch_tensors import TensorConverter
from worker.tensor_declarations import NamedDatatype

logger = logging.getLogger("weir.worker")

_SOLE = Argument("")


class _Input(NamedTuple):
    place: int
    argument: Argument
    datatype: str


class TorchCall:
    """See the module. `outputs` are all that are wanted of the model, states included."""

    def __init__(self, torch: Any, program: Program, config: ModelConfig, outputs: Sequence[NamedDatatype]) -> None:
        self._torch = torch
        self._program = program
        self._outputs = outputs
        # A list without elements may be of strings or of tensors.
        self._empty_is_strings = any(output.datatype == "BYTES" for output in outputs)
        self._output_places = output_places(config, [output.name for output in outputs])
        self.converter = TensorConverter(torch, program.writes_inputs)
        signature = program.signature
        places = input_places(config, signature)
        self._collects = signature.collects
        types = {tensor.name: BY_CONFIG_NAME[tensor.data_type].name for tensor in config.input}
        if config.sequence_batching is not None:
            types |= {row.input_name: BY_CONFIG_NAME[row.data_type].name for row in config.sequence_batching.state}
        self._inputs = {
            name: _Input(place, _SOLE if signature.collects else signature.arguments[place], types.get(name, ""))
            for name, place in places.items()
        }
        self._size = len(places) if signature.collects else len(signature.arguments)
        self.host_inputs = frozenset(
            name for name, row in self._inputs.items() if row.argument.kind != TENSOR or row.datatype == "BYTES"
        )

    def argument(self, name: str, array: np.ndarray) -> Any:
        """What the model is given for an input that lies on the host."""
        row = self._inputs[name]
        return self.converter.argument(row.argument, name, array, row.datatype)

    def run(self, inputs: Mapping[str, Any]) -> list[Any]:
        """The model's values for the outputs, unchecked and in order. Raises WeirError, DeviceLost."""
        try:
            return self._picked(self._program(self._arguments(inputs)))
        except WeirError:
            raise
        except Exception as error:
            raise self._failure(error) from error

    def _arguments(self, inputs: Mapping[str, Any]) -> Sequence[Any]:
        if self._collects == "dict":
            return [dict(inputs)]
        arguments = [NotGiven] * self._size
        for name, value in inputs.items():
            arguments[self._inputs[name].place] = value
        if self._collects == "list":
            return [[value for value in arguments if value is not NotGiven]]
        for place, argument in enumerate(self._program.signature.arguments):
            if arguments[place] is NotGiven and not argument.is_optional:
                raise invalid(f"nothing is given for '{argument.name}', which the model needs")
        return arguments

    def _picked(self, result: Any) -> list[Any]:
        names: Sequence[str] = ()
        if isinstance(result, dict):
            names, values = list(result), list(result.values())
        elif isinstance(result, (tuple, list)) and not self._is_strings(result):
            names, values = getattr(result, "_fields", ()), self._flat(result)
        else:
            values = [result]
        picked: list[Any] = []
        for output in self._outputs:
            place = names.index(output.name) if output.name in names else self._output_places[output.name]
            if place >= len(values):
                raise no_such_output(output.name, len(values))
            picked.append(values[place])
        return picked

    def _flat(self, values: Sequence[Any]) -> list[Any]:
        found: list[Any] = []
        for value in values:
            if isinstance(value, (tuple, list)) and not self._is_strings(value):
                found += self._flat(value)
            else:
                found.append(value)
        return found

    def _is_strings(self, value: Any) -> bool:
        return isinstance(value, list) and (isinstance(value[0], str) if value else self._empty_is_strings)

    def _failure(self, error: Exception) -> Exception:
        torch = self._torch
        text = _without_frames(str(error))
        if isinstance(error, torch.OutOfMemoryError):
            return unavailable(f"the GPU has no memory left: {text.splitlines()[0]}")
        if isinstance(error, RuntimeError) and ("CUDA error" in text or _is_accelerators(torch, error)):
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                # Once an error sticks to the context of a device, everything that this process asks of it fails.
                return DeviceLost(f"the GPU can't be used any more: {text.splitlines()[0]}")
        refusal = self._program.refusal(error)
        if refusal:
            return invalid(f"the model takes no such input: {_without_frames(refusal)}")
        return internal(f"PyTorch execute failure: {text or type(error).__name__}")


class TorchRunner:
    """A model on the host, or wherever it places itself; see `worker.array_instance.ArrayRunner`.

    `outputs` are the call's, and `states` those of them that sequences keep. Made in the thread of its instance.
    """

    def __init__(
        self,
        torch: Any,
        call: TorchCall,
        options: TorchOptions,
        outputs: Sequence[NamedDatatype],
        states: Sequence[NamedDatatype],
    ) -> None:
        self._call = call
        self._outputs = outputs
        self._states = [outputs.index(state) for state in states]
        self._modes = ExitStack()
        enter_modes(torch, options, self._modes)

    def run(self, inputs: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        """See `worker.array_instance.ArrayRunner`."""
        call, converter = self._call, self._call.converter
        values = call.run({name: call.argument(name, array) for name, array in inputs.items()})
        arrays = [
            converter.array(output.name, value, output.datatype)
            for output, value in zip(self._outputs, values, strict=True)
        ]
        # What the model returns may be memory that it writes to again.
        for place in self._states:
            arrays[place] = arrays[place].copy()
        return arrays

    def close(self) -> None:
        """See `worker.array_instance.ArrayRunner`."""
        self._modes.close()
        del self._call


def enter_modes(torch: Any, options: TorchOptions, modes: ExitStack) -> None:
    """Sets what torch keeps for each thread, in the thread of an instance, until `modes` is closed."""
    torch.set_num_threads(options.intra_op_threads)
    modes.enter_context(torch.inference_mode() if options.inference_mode else torch.no_grad())
    if not options.optimized_execution:
        modes.enter_context(torch.jit.optimized_execution(False))


def _is_accelerators(torch: Any, error: Exception) -> bool:
    kind = getattr(torch, "AcceleratorError", None)
    return kind is not None and isinstance(error, kind)


def _without_frames(text: str) -> str:
    text = text.partition("\nException raised from ")[0].strip()
    # Of the frames of TorchScript only the reason: the others name files of whoever wrote the model.
    return text.splitlines()[-1] if "Traceback of TorchScript" in text else text

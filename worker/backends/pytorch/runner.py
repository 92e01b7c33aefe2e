"""Runs PyTorch models: `TorchCall` maps inputs by name to outputs by name, on tensors.

`TorchRunner` makes such calls with arrays of the host, `TorchDeviceRunner` with device memory on the stream of its
instance.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError, internal, invalid, unavailable
from weir.schemas.core.tensors import BY_CONFIG_NAME
from weir.worker.backend_api.interface import DeviceLost, DeviceTensor, InstanceStream
from weir.worker.backends.pytorch.library import TorchOptions
from weir.worker.backends.pytorch.programs import NotGiven, Program
from weir.worker.backends.pytorch.signature import TENSOR, Argument, input_places, no_such_output, output_places
from weir.worker.backends.pytorch.tensors import TensorConverter
from weir.worker.execution.batch_tensors import NamedDatatype

logger = logging.getLogger("weir.worker")


_SOLE = Argument("")


class _Input(NamedTuple):
    place: int
    argument: Argument
    datatype: str


class TorchCall:
    """Calls a program; `outputs` are all that are needed of the model, states included."""

    def __init__(self, torch: Any, program: Program, config: ModelConfig, outputs: Sequence[NamedDatatype]) -> None:
        self._torch = torch
        self._program = program
        self._outputs = outputs
        # An empty list may be one of strings or of tensors.
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
        """The model's argument for an input in host memory."""
        row = self._inputs[name]
        return self.converter.argument(row.argument, name, array, row.datatype)

    def run(self, inputs: Mapping[str, Any]) -> list[Any]:
        """The model's values for the outputs, in order and unchecked. Raises WeirError or DeviceLost."""
        return self._select(*self.run_all(inputs))

    def run_all(self, inputs: Mapping[str, Any]) -> tuple[Sequence[str], list[Any]]:
        """All of the model's values, and their names where it returns names. Raises WeirError or DeviceLost."""
        try:
            return self._named(self._program(self._arguments(inputs)))
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
                raise invalid(f"the model requires '{argument.name}', for which the request has no input")
        return arguments

    def _named(self, result: Any) -> tuple[Sequence[str], list[Any]]:
        if isinstance(result, dict):
            return list(result), list(result.values())
        if isinstance(result, (tuple, list)) and not self._is_strings(result):
            return getattr(result, "_fields", ()), self._flat(result)
        return (), [result]

    def _select(self, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
        selected: list[Any] = []
        for output in self._outputs:
            place = names.index(output.name) if output.name in names else self._output_places[output.name]
            if place >= len(values):
                raise no_such_output(output.name, len(values))
            selected.append(values[place])
        return selected

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
        if _is_out_of_memory(torch, error):
            return unavailable(f"the GPU has no memory left: {text.splitlines()[0]}")
        if isinstance(error, RuntimeError) and ("CUDA error" in text or _is_accelerators(torch, error)):
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                # The error is sticky: every operation of this process on the device fails from now on.
                return DeviceLost(f"the GPU can't be used any more: {text.splitlines()[0]}")
        input_error = self._program.input_error(error)
        if input_error:
            return invalid(f"the model rejects its inputs: {_without_frames(input_error)}")
        return internal(f"PyTorch execute failure: {text or type(error).__name__}")


def _is_out_of_memory(torch: Any, error: Exception) -> bool:
    """Whether the GPU's memory is full. TorchScript raises what happens in a program as RuntimeError, whatever it was."""
    return isinstance(error, torch.OutOfMemoryError) or "CUDA out of memory" in str(error)


class TorchRunner:
    """A model on the host, or wherever it places itself, as a `weir.worker.backends.array.ArrayRunner`.

    `outputs` are those of the call, and `states` those of them that sequences keep. Created in the thread of its instance.
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
        """Runs one batch."""
        call, converter = self._call, self._call.converter
        values = call.run({name: call.argument(name, array) for name, array in inputs.items()})
        arrays = [
            converter.array(output.name, value, output.datatype)
            for output, value in zip(self._outputs, values, strict=True)
        ]
        # The model may reuse the memory of what it returns.
        for place in self._states:
            arrays[place] = arrays[place].copy()
        return arrays

    def close(self) -> None:
        """Releases the program."""
        self._modes.close()
        del self._call


def enter_modes(torch: Any, options: TorchOptions, modes: ExitStack) -> None:
    """Sets torch's options of the calling thread, that of an instance, until `modes` is closed."""
    torch.set_num_threads(options.intra_op_threads)
    modes.enter_context(torch.inference_mode() if options.inference_mode else torch.no_grad())
    if not options.optimized_execution:
        modes.enter_context(torch.jit.optimized_execution(False))


def _is_accelerators(torch: Any, error: Exception) -> bool:
    kind = getattr(torch, "AcceleratorError", None)
    return kind is not None and isinstance(error, kind)


def _without_frames(text: str) -> str:
    text = text.partition("\nException raised from ")[0].strip()
    # Only the last line of a TorchScript traceback: the others name files of the model's author.
    return text.splitlines()[-1] if "Traceback of TorchScript" in text else text


class TorchDeviceRunner:
    """A model on a GPU (`weir.worker.backend_api.interface.DeviceRunner`). Created in the thread of its instance.

    Memory that torch allocates during a call belongs to the stream, and is reused only for later work of that stream.
    """

    can_capture = False  # while a graph is recorded, torch allocates only from a pool of that graph
    host_inputs: Collection[str]

    def __init__(
        self,
        torch: Any,
        call: TorchCall,
        options: TorchOptions,
        outputs: Sequence[NamedDatatype],
        stream: InstanceStream,
    ) -> None:
        self.host_inputs = call.host_inputs
        self._torch = torch
        self._call = call
        self._outputs = outputs
        self._cleans_cache = options.cleans_cache
        self._device = f"cuda:{stream.device_id}"
        self._modes = ExitStack()
        enter_modes(torch, options, self._modes)
        self._modes.enter_context(torch.cuda.device(stream.device_id))
        external = torch.cuda.ExternalStream(stream.handle, device=self._device)
        self._modes.enter_context(torch.cuda.stream(external))

    def enqueue(self, inputs: Mapping[str, DeviceTensor | np.ndarray]) -> Sequence[DeviceTensor | np.ndarray]:
        """Enqueues one batch."""
        call, converter = self._call, self._call.converter
        arguments = {
            name: converter.device_tensor(tensor, self._device)
            if isinstance(tensor, DeviceTensor)
            else call.argument(name, tensor)
            for name, tensor in inputs.items()
        }
        found: list[DeviceTensor | np.ndarray] = []
        for output, value in zip(self._outputs, call.run(arguments), strict=True):
            if isinstance(value, self._torch.Tensor) and value.is_cuda:
                checked = converter.checked(output.name, value, output.datatype)
                found.append(converter.on_device(checked, output.datatype))
            else:
                found.append(converter.array(output.name, value, output.datatype))
        if self._cleans_cache:
            self._torch.cuda.empty_cache()
        return found

    def close(self) -> None:
        """Releases the program."""
        self._modes.close()
        del self._call

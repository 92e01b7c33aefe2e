"""PyTorch: TorchScript, programs of `torch.export`, packages of AOTInductor, and classes given as source.

Instances are threads, because torch releases the interpreter's lock, and share programs that keep no state. TorchScript
modules may keep state, which can't be detected, so each instance has a copy unless the module is frozen or the parameter
ENABLE_WEIGHT_SHARING allows sharing. Packages of AOTInductor hold the lock, and classes are user code: these run in
processes of their own (`weir.worker.backends.isolation`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from weir.repository.completion import DescribedModel
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError, internal, invalid, unavailable
from weir.worker.backend_api.interface import (
    MAX_DEVICE_BATCHES,
    Availability,
    Instance,
    InstanceDevice,
    LoadedModel,
    ModelVersion,
    installed_version,
)
from weir.worker.backends.array import ArrayInstance
from weir.worker.backends.declarations import TensorDeclarations
from weir.worker.backends.pytorch import library as pytorch_library
from weir.worker.backends.pytorch.library import TorchOptions, torch_library
from weir.worker.backends.pytorch.programs import (
    Artifact,
    CompiledProgram,
    ExportedProgram,
    Format,
    ModuleProgram,
    Program,
    ScriptProgram,
    describe_tensors,
    find_artifact,
)
from weir.worker.backends.pytorch.runner import TorchCall, TorchRunner
from weir.worker.backends.pytorch.signature import check_strings, input_places, output_places
from weir.worker.backends.pytorch.tensors import TensorConverter
from weir.worker.devices.gpus import WorkerDevices, cuda_obstacle
from weir.worker.execution.batch_tensors import NamedDatatype

logger = logging.getLogger("weir.worker")

_ON_CPU = ("KIND_CPU", "KIND_AUTO")


class PyTorchBackend:
    """Describes and loads PyTorch models (`weir.worker.backend_api.interface.Backend`)."""

    def availability(self, devices: WorkerDevices) -> Availability:
        """Torch runs on the CPU; a build of it for CUDA also on GPUs."""
        formats = ("model.pt", "model.pt2", "model.py")
        version = installed_version("torch")
        if not version:
            return Availability((), formats, "", ("the torch package is not installed: install weir-serve[torch]",))
        runs_on: tuple[str, ...] = ("KIND_CPU", "KIND_MODEL")
        problems: tuple[str, ...] = ()
        if not pytorch_library.built_for_cuda():
            problems = (f"torch {version} is built without CUDA, so it can't run on GPUs",)
        elif not devices.host_gpus:
            problems = ("this machine has no GPU",)
        elif obstacle := cuda_obstacle():
            problems = (f"KIND_GPU: {obstacle}",)
        else:
            runs_on += ("KIND_GPU",)
        return Availability(runs_on, formats, version, problems)

    def prefers_process(self, model: ModelVersion) -> bool:
        """Whether instances run in processes of their own by default (`weir.worker.backends.isolation`)."""
        artifact = find_artifact(model)
        return artifact.format is Format.MODULE or (
            artifact.format is Format.COMPILED and _instances_on_cpu(model.config) > 1
        )

    def describe(self, model: ModelVersion) -> DescribedModel | None:
        """The inputs and outputs of a program of `torch.export`; the other formats don't describe theirs."""
        artifact = find_artifact(model)
        if artifact.format is not Format.EXPORTED:
            return None
        torch = torch_library()
        program = open_program(torch, artifact, None, TorchOptions(), model)
        if not isinstance(program, ExportedProgram):
            raise TypeError("a program of torch.export was expected")
        return _described(model.config, program, TensorConverter(torch, False))

    def load(self, model: ModelVersion) -> LoadedModel:
        """Finds the model's file and checks its options; instances open it. Raises WeirError."""
        return _TorchModel(model)


class _TorchModel:
    def __init__(self, model: ModelVersion) -> None:
        self._model = model
        self._artifact = find_artifact(model)
        self._options = TorchOptions.of(model.config)
        self._torch = torch_library()
        self._lock = threading.Lock()
        self._shared: dict[str | None, Program] = {}
        self._uses_gpu = False
        check_strings(model.config)
        with pytorch_library.lock:
            _set_process_options(self._torch, self._options)

    def create_instance(self, device: InstanceDevice) -> Instance:
        config, options, torch = self._model.config, self._options, self._torch
        place = _torch_device(torch, device)
        program = self._program(place)
        outputs, states = _declared(program, config, TensorConverter(torch, False))
        wanted = list(dict.fromkeys([*outputs, *states]))
        if device.kind != "KIND_GPU":
            call = TorchCall(torch, program, config, wanted)
            runner = TorchRunner(torch, call, options, wanted, states)
            return ArrayInstance(runner, config, outputs, states)

        self._uses_gpu = True
        from weir.worker.backends.pytorch.runner import TorchDeviceRunner
        from weir.worker.cuda.device_instance import DeviceInstance

        def open_runner(stream: Any) -> TorchDeviceRunner:
            return TorchDeviceRunner(torch, TorchCall(torch, program, config, wanted), options, wanted, stream)

        instance: Instance = DeviceInstance(open_runner, device, config, outputs, states)
        return instance

    def unload(self) -> None:
        self._shared.clear()
        if self._uses_gpu:
            # Torch would keep the memory for its own later tensors, and other libraries could not have it.
            self._torch.cuda.empty_cache()

    def _program(self, place: str | None) -> Program:
        """The program that instances on this device share, or a new one."""
        with self._lock:
            program = self._shared.get(place)
            if program is not None:
                return program
            program = open_program(self._torch, self._artifact, place, self._options, self._model)
            shares = self._options.shares_weights
            if not program.keeps_state if shares is None else shares:
                self._shared[place] = program
            return program


def open_program(
    torch: Any, artifact: Artifact, place: str | None, options: TorchOptions, model: ModelVersion
) -> Program:
    """The model's program on this device (torch's name, None where the model places itself). Raises WeirError."""
    try:
        with pytorch_library.lock, pytorch_library.without_deprecations_of_jit():
            if artifact.format is Format.TORCHSCRIPT:
                return ScriptProgram(torch, artifact.path, place)
            if artifact.format is Format.EXPORTED:
                return ExportedProgram(torch, artifact.path, place)
            if artifact.format is Format.COMPILED:
                runners = runs_at_once(model.config, place)
                return CompiledProgram(torch, artifact.path, place, runners, model.config.max_batch_size > 0)
            return ModuleProgram(torch, artifact, place, options)
    except WeirError:
        raise
    except torch.OutOfMemoryError as error:
        raise unavailable(f"failed to load model '{model.name}': the GPU has no memory left") from error
    except Exception as error:
        text = str(error).partition("\nException raised from ")[0].replace(str(model.model_directory), model.name)
        raise internal(f"failed to load model '{model.name}': {text}") from error


def _torch_device(torch: Any, device: InstanceDevice) -> str | None:
    if device.kind == "KIND_MODEL":
        return None
    if device.kind != "KIND_GPU":
        return "cpu"
    if not torch.cuda.is_available():
        raise unavailable(
            f"instance {device.name} is of kind KIND_GPU, but torch {torch.__version__} finds no usable GPU"
        )
    return f"cuda:{device.device_id}"


def _declared(
    program: Program, config: ModelConfig, converter: TensorConverter
) -> tuple[list[NamedDatatype], list[NamedDatatype]]:
    """The outputs and states that the model must return. Raises WeirError if the configuration does not fit the program."""
    places = input_places(config, program.signature)
    inputs: dict[str, Sequence[int]] = {name: [-1] for name in places}
    outputs: dict[str, str] = {output.name: output.data_type for output in config.output}
    if config.sequence_batching is not None:
        outputs |= {state.output_name: state.data_type for state in config.sequence_batching.state}
    if isinstance(program, ExportedProgram):
        actual = _described(config, program, converter)
        inputs |= {tensor.name: tensor.dims for tensor in actual.inputs}
        outputs |= {tensor.name: tensor.data_type for tensor in actual.outputs if tensor.name in outputs}
        _check_batch_range(program, config)
    declared = TensorDeclarations(inputs, outputs)
    declared.check_inputs(config)
    return declared.outputs(config), declared.states(config)


def _described(config: ModelConfig, program: ExportedProgram, converter: TensorConverter) -> DescribedModel:
    """The program's inputs and outputs, under the names in `config`."""
    positions = {argument.name: place for place, argument in enumerate(program.signature.arguments)}
    renamed = {place: name for name, place in input_places(config, program.signature).items()} if config.input else {}
    inputs = [renamed.get(positions[name], name) for name, *_ in program.inputs]
    names = [name for name, *_ in program.outputs]
    wanted = [output.name for output in config.output]
    if config.sequence_batching is not None:
        wanted += [state.output_name for state in config.sequence_batching.state]
    for name, place in output_places(config, list(dict.fromkeys(wanted))).items():
        if name not in names and place < len(names):
            names[place] = name
    return DescribedModel(
        describe_tensors(program.inputs, inputs, converter.config_type),
        describe_tensors(program.outputs, names, converter.config_type),
        largest_batch=program.batch_range.most if program.batch_range is not None else None,
    )


def _check_batch_range(program: ExportedProgram, config: ModelConfig) -> None:
    found = program.batch_range
    if found is None or config.max_batch_size == 0:
        return
    if found.most is not None and config.max_batch_size > found.most:
        raise invalid(
            f"model '{config.name}' has max_batch_size {config.max_batch_size}, but its program was exported for batches "
            f"of at most {found.most}"
        )
    if found.least > 1:
        logger.warning(
            "model '%s': its program was exported for batches of at least %d: smaller batches fail",
            config.name,
            found.least,
        )


def runs_at_once(config: ModelConfig, place: str | None) -> int:
    """How many runs a program on this torch device ("cuda:0") may have under way.

    A package of AOTInductor with fewer runners waits for the GPU with the interpreter's lock held: the worker would stand
    still. Source: `AOTInductorModelContainer` in PyTorch.
    """
    if place is None or not place.startswith("cuda"):
        return max(1, _instances_on_cpu(config))
    gpu = int(place.partition(":")[2] or 0)
    groups = [group for group in config.instance_group if group.kind == "KIND_GPU" and gpu in group.gpus]
    return MAX_DEVICE_BATCHES * max(1, sum(max(1, group.count) for group in groups))


def _instances_on_cpu(config: ModelConfig) -> int:
    groups = config.instance_group
    return sum(max(1, group.count) for group in groups if group.kind in _ON_CPU) if groups else 1


def _set_process_options(torch: Any, options: TorchOptions) -> None:
    """Sets torch's process-wide options, which apply to all models of the process, as in Triton."""
    if options.inter_op_threads is not None:
        try:
            torch.set_num_interop_threads(options.inter_op_threads)
        except RuntimeError:
            logger.warning("INTER_OP_THREAD_COUNT has no effect: this process has already started its inter-op threads")
    if not options.cudnn:
        torch.backends.cudnn.enabled = False
    switches = (
        (options.jit_profiling, torch._C._jit_set_profiling_mode),
        (options.jit_executor, torch._C._jit_set_profiling_executor),
        (options.tensor_fuser, torch._C._jit_set_texpr_fuser_enabled),
    )
    for value, switch in switches:
        if value is not None:
            switch(value)

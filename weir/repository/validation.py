"""The rules that a configuration must satisfy before its model is loaded.

`validate` raises the first `ConfigProblem` it finds. Texts and limits are those of Triton's load-time validation.
`weir.repository.completion` checks the configuration against the model's file, `weir.repository.scheduler_rules` has
the rules of the schedulers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isnan, prod

from weir.repository.completion import check_platform
from weir.repository.paths import check_relative
from weir.repository.problems import ConfigProblem
from weir.repository.scheduler_rules import (
    check_dynamic_batching,
    check_ensemble,
    check_queue_wait,
    check_sequence_batching,
)
from weir.schemas.config.model_config import BatchInput, BatchOutput, ModelConfig, ModelInput, ModelOutput
from weir.schemas.config.parameters import ParameterError, check_partitions, needs_of, queue_bounds_problem
from weir.schemas.config.traffic import rule_of
from weir.schemas.wire.statistics import MAX_BUCKETS

_FOR_TENSORRT = {
    "is_shape_tensor": "shape tensors are only supported for TensorRT platform",
    "is_non_linear_format_io": "Non-linear IO format is only supported for the TensorRT platform",
}
_USABLE = "GPUs with at least the minimum required CUDA compute compatibility of 6.000000 are: "


def validate(config: ModelConfig, gpu_ids: Sequence[int]) -> None:
    """Raises ConfigProblem when `config`, completed and normalised, can't be served on a host with GPUs `gpu_ids`."""
    check_platform(config)
    if config.max_batch_size < 0:
        raise ConfigProblem("max_batch_size", f"'max_batch_size' must be non-negative value for {config.name}")
    _check_files(config)
    _check_tensors(config)
    _check_batch_tensors(config)
    if config.dynamic_batching is not None:
        check_dynamic_batching(config, config.dynamic_batching)
    if config.sequence_batching is not None:
        check_sequence_batching(config, config.sequence_batching)
    check_ensemble(config)
    check_queue_wait(config)
    _check_instances(config, gpu_ids)
    _check_response_cache(config)
    _check_needs(config)
    _check_warmup(config)
    _check_metrics(config)


def _check_files(config: ModelConfig) -> None:
    for field, filename in _filenames(config):
        check_relative(filename, field)


def _filenames(config: ModelConfig) -> Iterator[tuple[str, str]]:
    yield "runtime", config.runtime
    yield "default_model_filename", config.default_model_filename
    for filename in config.cc_model_filenames.values():
        yield "cc_model_filenames", filename
    for index, output in enumerate(config.output):
        yield f"output[{index}].label_filename", output.label_filename
    if config.model_operations is not None:
        for filename in config.model_operations.op_library_filename:
            yield "model_operations.op_library_filename", filename
    for index, warmup in enumerate(config.model_warmup):
        for tensor in warmup.inputs.values():
            yield f"model_warmup[{index}].inputs", tensor.input_data_file or ""
    if config.sequence_batching is not None:
        for index, state in enumerate(config.sequence_batching.state):
            for initial in state.initial_state:
                yield f"sequence_batching.state[{index}].initial_state", initial.data_file or ""


def _check_tensors(config: ModelConfig) -> None:
    for field in ("input", "output"):
        seen: set[str] = set()
        tensors: list[ModelInput | ModelOutput] = getattr(config, field)
        for index, tensor in enumerate(tensors):
            path = f"{field}[{index}]"
            if tensor.name in seen:
                raise ConfigProblem(f"{path}.name", f"model {field} '{tensor.name}' is given twice for {config.name}")
            seen.add(tensor.name)
            _check_tensor(config, field, path, tensor)


def _check_tensor(config: ModelConfig, field: str, path: str, tensor: ModelInput | ModelOutput) -> None:
    subject = f"model {field} '{tensor.name}'"
    if not tensor.name:
        raise ConfigProblem(f"{path}.name", f"model {field} must specify 'name' for {config.name}")
    if tensor.data_type == "TYPE_INVALID":
        raise ConfigProblem(f"{path}.data_type", f"{subject} must specify 'data_type' for {config.name}")
    if not tensor.dims:
        raise ConfigProblem(f"{path}.dims", f"{subject} must specify 'dims' for {config.name}")
    _check_dims(config, f"{path}.dims", f"{subject} dimension", tensor.dims)
    if tensor.reshape is not None:
        _check_dims(config, f"{path}.reshape", f"{subject} reshape dimension", tensor.reshape.shape)
        _check_reshape(config, f"{path}.reshape", subject, tensor.dims, tensor.reshape.shape)
    for flag, what in _FOR_TENSORRT.items():
        if getattr(tensor, flag) and config.backend != "tensorrt":
            raise ConfigProblem(f"{path}.{flag}", f"{what} for {config.name}")
    if isinstance(tensor, ModelInput):
        if tensor.format != "FORMAT_NONE" and len(tensor.dims) != 3:
            raise ConfigProblem(f"{path}.format", f"model input NHWC/NCHW require 3 dims for {config.name}")
        if tensor.allow_ragged_batch and config.max_batch_size == 0:
            raise ConfigProblem(
                f"{path}.allow_ragged_batch", f"{subject} can't be ragged in a model without batching: {config.name}"
            )


def _check_dims(config: ModelConfig, path: str, subject: str, dims: Sequence[int]) -> None:
    if any(dim < 1 and dim != -1 for dim in dims):
        message = f"{subject} must be integer >= 1, or -1 to indicate a variable-size dimension for {config.name}"
        raise ConfigProblem(path, message)


def _check_reshape(config: ModelConfig, path: str, subject: str, dims: Sequence[int], shape: Sequence[int]) -> None:
    """Both shapes hold the same elements: their variable dimensions pair up, and the fixed ones between agree.

    Shapes of which one alone has variable dimensions differ in size, in Triton's words.
    """
    if -1 in dims and -1 in shape and dims.count(-1) != shape.count(-1):
        message = f"{subject} has different number of variable-size dimensions for dims and reshape for {config.name}"
        raise ConfigProblem(path, message)
    if [prod(run) for run in _fixed_runs(dims)] != [prod(run) for run in _fixed_runs(shape)]:
        raise ConfigProblem(path, f"{subject} has different size for dims and reshape for {config.name}")


def check_written_scalars(written: ModelConfig, max_batch_size: int) -> None:
    """Raises ConfigProblem, as Triton, for a scalar in a configuration as its author wrote it, of a model without batches.

    A scalar that completion adds from the model's file is allowed (`weir.repository.completion`), other than in Triton.
    """
    for field in ("input", "output"):
        tensors: list[ModelInput | ModelOutput] = getattr(written, field)
        for index, tensor in enumerate(tensors):
            if tensor.reshape is not None and not tensor.reshape.shape and max_batch_size == 0:
                message = (
                    f"model {field} '{tensor.name}' cannot have empty reshape for non-batching model as scalar tensors "
                    f"are not supported for {written.name}"
                )
                raise ConfigProblem(f"{field}[{index}].reshape", message)


def _fixed_runs(dims: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = [[]]
    for dim in dims:
        if dim == -1:
            runs.append([])
        else:
            runs[-1].append(dim)
    return runs


def _check_batch_tensors(config: ModelConfig) -> None:
    for index, batch_input in enumerate(config.batch_input):
        _check_batch_input(config, f"batch_input[{index}]", batch_input)
    for index, batch_output in enumerate(config.batch_output):
        path = f"batch_output[{index}]"
        _check_source(config, path, "output", batch_output)
        for position, name in enumerate(batch_output.target_name):
            if name not in config.output_by_name:
                raise ConfigProblem(f"{path}.target_name", f"unknown target output name '{name}' for {config.name}")
            if name in batch_output.target_name[:position]:
                message = f"target output name '{name}' can only be specified once for {config.name}"
                raise ConfigProblem(f"{path}.target_name", message)


def _check_batch_input(config: ModelConfig, path: str, batch_input: BatchInput) -> None:
    if batch_input.data_type not in ("TYPE_INT32", "TYPE_FP32"):
        message = f"batch input data type must be TYPE_INT32 or TYPE_FP32 for {config.name}"
        raise ConfigProblem(f"{path}.data_type", message)
    if not batch_input.target_name:
        raise ConfigProblem(f"{path}.target_name", f"batch input must specify 'target_name' for {config.name}")
    _check_source(config, path, "input", batch_input)


def _check_source(config: ModelConfig, path: str, what: str, tensor: BatchInput | BatchOutput) -> None:
    count = len(tensor.source_input)
    if count != 1:
        message = f"batch {what} kind '{tensor.kind}' expects 1 source input, got {count} for {config.name}"
        raise ConfigProblem(f"{path}.source_input", message)
    _check_known_inputs(config, f"{path}.source_input", tensor.source_input)


def _check_known_inputs(config: ModelConfig, path: str, names: Sequence[str]) -> None:
    for name in names:
        if name not in config.input_by_name:
            raise ConfigProblem(path, f"unknown source input name '{name}' for {config.name}")


def _check_instances(config: ModelConfig, gpu_ids: Sequence[int]) -> None:
    for index, group in enumerate(config.instance_group):
        path = f"instance_group[{index}]"
        subject = f"instance group {group.name} of model {config.name}"
        if group.kind == "KIND_GPU":
            if not group.gpus:
                message = f"{subject} has kind KIND_GPU but no GPUs are available"
                raise ConfigProblem(f"{path}.kind", message)
            for gpu in group.gpus:
                if gpu not in gpu_ids:
                    message = f"{subject} specifies invalid or unsupported gpu id {gpu}. {_USABLE}{_listed(gpu_ids)}"
                    raise ConfigProblem(f"{path}.gpus", message)
        elif group.gpus:
            raise ConfigProblem(f"{path}.gpus", f"{subject} has kind {group.kind} but specifies one or more GPUs")
        if group.profile and config.platform != "tensorrt_plan" and config.backend != "tensorrt":
            # Without the space, as Triton writes it.
            problem = "specifies profile field which is only supported for TensorRT models"
            raise ConfigProblem(f"{path}.profile", f"{subject} and platform {config.platform}{problem}")


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _check_needs(config: ModelConfig) -> None:
    try:
        needs_of(config)
        check_partitions(config)
        rule_of(config)
    except ParameterError as problem:
        raise ConfigProblem(f'parameters["{problem.parameter}"]', f"model '{config.name}': {problem}") from problem
    problem_of_queue = queue_bounds_problem(config)
    if problem_of_queue is not None:
        name, reason = problem_of_queue
        raise ConfigProblem(f'parameters["{name}"]', f"model '{config.name}': parameter '{name}' {reason}")


def _check_response_cache(config: ModelConfig) -> None:
    if not config.caches_responses:
        return
    prefix = f"Response Cache does not currently support model {config.name} with"
    suffix = "Please disable the response cache."
    if config.sequence_batching is not None:
        raise ConfigProblem("response_cache", f"{prefix} sequence batching scheduler. {suffix}")
    if config.is_decoupled:
        raise ConfigProblem("response_cache", f"{prefix} 'decoupled' transaction policy. {suffix}")


def _check_metrics(config: ModelConfig) -> None:
    """Raises ConfigProblem, in Triton's words, for a control of a metric that lacks a part."""
    for index, control in enumerate(config.model_metrics.metric_control if config.model_metrics else ()):
        path = f"model_metrics.metric_control[{index}]"
        if control.metric_identifier is None:
            raise ConfigProblem(path, "metric control must specify 'metric_identifier'")
        if not control.metric_identifier.family:
            raise ConfigProblem(f"{path}.metric_identifier.family", "metric identifier must specify non-empty 'family'")
        if control.histogram_options is None:
            raise ConfigProblem(path, "metric control must specify 'histogram_options'")
        if not control.histogram_options.buckets:
            raise ConfigProblem(
                f"{path}.histogram_options.buckets", "histogram options must specify non-empty 'buckets'"
            )
        if len(control.histogram_options.buckets) > MAX_BUCKETS or any(map(isnan, control.histogram_options.buckets)):
            raise ConfigProblem(
                f"{path}.histogram_options.buckets",
                f"histogram options must specify at most {MAX_BUCKETS} 'buckets', each of them a number",
            )


def _check_warmup(config: ModelConfig) -> None:
    for index, warmup in enumerate(config.model_warmup):
        path = f"model_warmup[{index}]"
        if warmup.batch_size > max(1, config.max_batch_size):
            message = f"warmup '{warmup.name}' has batch size {warmup.batch_size}, above that of {config.name}"
            raise ConfigProblem(f"{path}.batch_size", message)
        if warmup.batch_size == 0:
            continue  # Triton passes it over
        for name, tensor in warmup.inputs.items():
            if tensor.data_type == "TYPE_INVALID":
                message = f"warmup '{warmup.name}' input '{name}' must specify 'data_type' for {config.name}"
                raise ConfigProblem(f"{path}.inputs", message)
            if any(dim < 0 for dim in tensor.dims):
                message = f"warmup setting expects all variable-size dimensions are specified for input '{name}'"
                raise ConfigProblem(f"{path}.inputs", message)
            if (tensor.zero_data, tensor.random_data, tensor.input_data_file) == (None, None, None):
                message = f"warmup setting expects input '{name}' to have input_data_type set"
                raise ConfigProblem(f"{path}.inputs", message)

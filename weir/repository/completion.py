"""The values that a configuration leaves out, from the model's files, from the backend's description, and from Triton's
defaults.

`fill_backend` derives backend and platform from the file names. `complete` adds what the backend reads in the model's
file, and checks the configuration against it. `normalize` adds the defaults, so that the configuration that clients
read is the one in force.

Sources: Triton's default artifact names and platform names (model repository documentation), its auto-complete of ONNX
models and its normalisation, as seen at the config endpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weir.repository.problems import ConfigProblem
from weir.schemas.config.model_config import (
    DynamicBatching,
    InstanceGroup,
    LatestVersions,
    ModelConfig,
    ModelInput,
    ModelOutput,
    OptimizationPolicy,
    PinnedMemoryBuffer,
    Reshape,
    SequenceBatching,
    VersionPolicy,
)
from weir.schemas.core.errors import invalid

DEFAULT_MAX_BATCH_SIZE = 4
DEFAULT_SEQUENCE_IDLE_US = 1_000_000

_Tensor = ModelInput | ModelOutput


_IDENTITY = frozenset({"name"})
"""Fields that completion leaves alone: the name of a model is that of its folder."""


class DescribedTensor(NamedTuple):
    """An input or output as the model's file has it: `data_type` as in `config.pbtxt`, `dims` whole, -1 any size.

    `first_symbol` is the name that the file gives to the first dimension where that is variable ("batch"), "" without one.
    """

    name: str
    data_type: str
    dims: Sequence[int]
    first_symbol: str = ""


class DescribedModel(NamedTuple):
    """A backend's own description of a model.

    `defaulted` are inputs for which the model itself has a value: they may be declared, and are then `optional`.
    `largest_batch` is the largest first dimension that the model takes, None without a limit. `tried_size` is a size of
    other variable dimensions with which the model was run, None if it was not.
    """

    inputs: Sequence[DescribedTensor]
    outputs: Sequence[DescribedTensor]
    defaulted: Sequence[DescribedTensor] = ()
    largest_batch: int | None = None
    tried_size: int | None = None

    @property
    def can_batch(self) -> bool:
        """Whether the first dimension of every tensor is variable, so that it can be the batch."""
        tensors = [*self.inputs, *self.outputs]
        return bool(tensors) and all(tensor.dims and tensor.dims[0] == -1 for tensor in tensors)


def complete(
    config: ModelConfig, described: DescribedModel | None, default_max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
) -> ModelConfig:
    """`config` with tensors, batch size and batcher completed from `described` (None: the backend can't describe).

    Values of `config` are kept and checked: ConfigProblem names the tensor that differs from the model.
    """
    if described is None:
        return config
    changes: dict[str, Any] = {}
    if config.max_batch_size == 0 and described.can_batch and _leaves_out_batch(config, described):
        changes["max_batch_size"] = min(default_max_batch_size, described.largest_batch or default_max_batch_size)
    config = config.replace(**changes)
    if config.max_batch_size > 0:
        _check_can_batch(config, described)
    changes = {
        "input": _complete_tensors(config, "input", described.inputs, described.defaulted),
        "output": _complete_tensors(config, "output", described.outputs),
    }
    if config.max_batch_size > 1 and not (config.dynamic_batching or config.sequence_batching):
        changes["dynamic_batching"] = DynamicBatching()
    return config.replace(**changes)


def completed_fields(written: ModelConfig, served: ModelConfig) -> list[str]:
    """The fields of `served` that its author left out, or wrote in part, in the order of the configuration's fields."""
    before, after = written.model_dump(exclude_defaults=True), served.model_dump(exclude_defaults=True)
    return [name for name, value in after.items() if name not in _IDENTITY and before.get(name) != value]


def _leaves_out_batch(config: ModelConfig, described: DescribedModel) -> bool:
    """Whether the tensors `config` declares lack the model's first dimension; true when it declares none."""
    in_model = {tensor.name: tensor for tensor in [*described.inputs, *described.outputs]}
    declared: list[_Tensor] = [*config.input, *config.output]
    for tensor in declared:
        if tensor.name in in_model and tensor.dims:
            return len(_model_dims(tensor)) < len(in_model[tensor.name].dims)
    return True


def _check_can_batch(config: ModelConfig, described: DescribedModel) -> None:
    without_batch = _without_batch(config) | {name for row in config.batch_input for name in row.target_name}
    for tensor in [*described.inputs, *described.outputs]:
        declared = config.input_by_name.get(tensor.name)
        if tensor.name in without_batch or (declared is not None and declared.is_shape_tensor):
            continue
        if not tensor.dims or tensor.dims[0] != -1:
            raise ConfigProblem(
                "max_batch_size",
                f"model '{config.name}' has max_batch_size {config.max_batch_size}, but the first dimension of tensor "
                f"'{tensor.name}' is not variable: its shape is {list(tensor.dims)}",
            )


def _without_batch(config: ModelConfig) -> set[str]:
    """Tensors that have a batch dimension for clients, but hold a whole batch in one piece for the model."""
    ragged = {tensor.name for tensor in config.input if tensor.allow_ragged_batch}
    return ragged | {name for batch_output in config.batch_output for name in batch_output.target_name}


def _complete_tensors(
    config: ModelConfig,
    field: str,
    described: Sequence[DescribedTensor],
    defaulted: Sequence[DescribedTensor] = (),
) -> list[_Tensor]:
    declared: list[_Tensor] = getattr(config, field)
    in_model = {tensor.name: tensor for tensor in (*described, *defaulted)}
    tensors: list[_Tensor] = []
    for index, tensor in enumerate(declared):
        seen = in_model.get(tensor.name)
        if seen is None:
            raise ConfigProblem(
                f"{field}[{index}].name",
                f"unexpected inference {field} '{tensor.name}' for model '{config.name}', "
                f"allowed {field}s are: {', '.join(in_model)}",
            )
        _check_tensor(config, f"{field}[{index}]", tensor, seen)
        tensors.append(tensor.replace(**_missing(config, tensor, seen)))
    # A model's outputs may be left out on purpose; its inputs must all come from somewhere.
    if field == "input" or not declared:
        absent = in_model.keys() - {tensor.name for tensor in declared} - _internal_tensors(config)
        kind: type[_Tensor] = ModelInput if field == "input" else ModelOutput
        for seen in described:
            if seen.name in absent:
                blank = kind(name=seen.name)
                tensors.append(blank.replace(**_missing(config, blank, seen)))
    return tensors


def _internal_tensors(config: ModelConfig) -> set[str]:
    """Inputs that the server makes, and outputs that stay in it unless they are declared."""
    names = {name for batch_input in config.batch_input for name in batch_input.target_name}
    if config.sequence_batching is not None:
        names |= {control.name for control in config.sequence_batching.control_input}
        for state in config.sequence_batching.state:
            names |= {state.input_name, state.output_name}
    return names


def _missing(config: ModelConfig, tensor: _Tensor, seen: DescribedTensor) -> dict[str, Any]:
    """The fields of `tensor` that `seen` fills in."""
    fields: dict[str, Any] = {}
    if tensor.data_type == "TYPE_INVALID":
        fields["data_type"] = seen.data_type
    if not tensor.dims:
        batched = config.max_batch_size > 0 and tensor.name not in _without_batch(config)
        dims = list(seen.dims[1:] if batched else seen.dims)
        # `dims` can't be empty, so a scalar is one element to clients and reshaped for the model.
        fields |= {"dims": dims} if dims else {"dims": [1], "reshape": Reshape()}
    return fields


def _check_tensor(config: ModelConfig, path: str, tensor: _Tensor, seen: DescribedTensor) -> None:
    if tensor.data_type not in ("TYPE_INVALID", seen.data_type):
        raise ConfigProblem(
            f"{path}.data_type",
            f"model '{config.name}', tensor '{tensor.name}': the model expects {seen.data_type}, "
            f"but the configuration specifies {tensor.data_type}",
        )
    if not tensor.dims or tensor.is_shape_tensor or tensor.name in _without_batch(config):
        return
    declared = [-1, *_model_dims(tensor)] if config.max_batch_size > 0 else _model_dims(tensor)
    expected = list(seen.dims)
    agree = len(declared) == len(expected) and all(
        wanted in (-1, given) for given, wanted in zip(declared, expected, strict=True)
    )
    if not agree:
        raise ConfigProblem(
            f"{path}.dims",
            f"model '{config.name}', tensor '{tensor.name}': the model expects {len(expected)} dimensions "
            f"(shape {expected}) but the model configuration specifies {len(declared)} dimensions (shape {declared}, "
            f"{'with' if config.max_batch_size > 0 else 'without'} the batch dimension){_difference(declared, expected)}",
        )


def _difference(declared: Sequence[int], expected: Sequence[int]) -> str:
    """Which sizes differ, where the numbers of dimensions agree: Triton's text compares those alone."""
    if len(declared) != len(expected):
        return ""
    differences = [
        f"dimension {place} is {given}, the model's is {wanted}"
        for place, (given, wanted) in enumerate(zip(declared, expected, strict=True))
        if wanted not in (-1, given)
    ]
    return f": {', '.join(differences)}"


def _model_dims(tensor: _Tensor) -> list[int]:
    return tensor.dims if tensor.reshape is None else tensor.reshape.shape


def normalize(config: ModelConfig, gpu_ids: Sequence[int], backend_uses_gpus: bool = True) -> ModelConfig:
    """`config` with its defaults written out, for a host with the GPUs `gpu_ids`. Applying it twice changes nothing.

    Instances without a kind are placed on the GPUs if `backend_uses_gpus`, and on the CPU otherwise or if there are none.
    """
    changes: dict[str, Any] = {}
    if config.version_policy is None:
        changes["version_policy"] = VersionPolicy(latest=LatestVersions(num_versions=1))
    if config.dynamic_batching is not None and config.max_batch_size > 0:
        batching = config.dynamic_batching
        if not batching.preferred_batch_size:
            changes["dynamic_batching"] = batching.replace(preferred_batch_size=[config.max_batch_size])
    if config.sequence_batching is not None:
        changes["sequence_batching"] = _normal_sequences(config.sequence_batching, config.max_batch_size)
    if not config.is_ensemble:
        changes["optimization"] = _normal_optimization(config.optimization or OptimizationPolicy())
        changes["instance_group"] = _normal_groups(config, gpu_ids, gpu_ids if backend_uses_gpus else ())
    return config.replace(**changes)


def _normal_sequences(sequences: SequenceBatching, max_batch_size: int) -> SequenceBatching:
    changes: dict[str, Any] = {}
    if sequences.max_sequence_idle_microseconds == 0:
        changes["max_sequence_idle_microseconds"] = DEFAULT_SEQUENCE_IDLE_US
    oldest = sequences.oldest
    if oldest is not None and not oldest.preferred_batch_size and max_batch_size > 0:
        changes["oldest"] = oldest.replace(preferred_batch_size=[max_batch_size])
    return sequences.replace(**changes)


def _normal_optimization(optimization: OptimizationPolicy) -> OptimizationPolicy:
    pinned = PinnedMemoryBuffer(enable=True)
    return optimization.replace(
        input_pinned_memory=optimization.input_pinned_memory or pinned,
        output_pinned_memory=optimization.output_pinned_memory or pinned,
    )


def _normal_groups(config: ModelConfig, gpu_ids: Sequence[int], auto_gpu_ids: Sequence[int]) -> list[InstanceGroup]:
    if not config.instance_group:
        return [_normal_group(InstanceGroup(name=config.name), config, gpu_ids, auto_gpu_ids)]
    return [
        _normal_group(group.replace(name=group.name or f"{config.name}_{index}"), config, gpu_ids, auto_gpu_ids)
        for index, group in enumerate(config.instance_group)
    ]


def _normal_group(
    group: InstanceGroup, config: ModelConfig, gpu_ids: Sequence[int], auto_gpu_ids: Sequence[int]
) -> InstanceGroup:
    changes: dict[str, Any] = {}
    kind = group.kind
    if kind == "KIND_AUTO":
        # As in Triton: where one of the GPUs it lists is not there, it is meant for the CPU, and refused for listing them.
        kind = "KIND_GPU" if auto_gpu_ids and all(gpu in auto_gpu_ids for gpu in group.gpus) else "KIND_CPU"
        changes["kind"] = kind
    if kind == "KIND_GPU" and not group.gpus:
        changes["gpus"] = list(gpu_ids)
    if group.count < 1:
        changes["count"] = 2 if kind == "KIND_CPU" and config.backend == "onnxruntime" else 1
    return group.replace(**changes)


class DefaultArtifact(NamedTuple):
    """The default file name of one kind of model, and the backend and platform ("" for none) that go with it."""

    filename: str
    backend: str
    platform: str


ARTIFACTS = (
    DefaultArtifact("model.plan", "tensorrt", "tensorrt_plan"),
    DefaultArtifact("model.onnx", "onnxruntime", "onnxruntime_onnx"),
    DefaultArtifact("model.xml", "openvino", ""),
    DefaultArtifact("model.pt", "pytorch", "pytorch_libtorch"),
    DefaultArtifact("model.pt2", "pytorch", "torch_aoti"),
    DefaultArtifact("model.py", "python", ""),
)

ENSEMBLE_PLATFORM = "ensemble"

_PLATFORM_BACKEND = {artifact.platform: artifact.backend for artifact in ARTIFACTS if artifact.platform}


def check_platform(config: ModelConfig) -> None:
    """Raises ConfigProblem unless platform and backend agree, in Triton's words."""
    if config.platform == ENSEMBLE_PLATFORM:
        if config.backend:
            message = f"Ensemble model '{config.name}' must have platform type 'ensemble' and empty backend type"
            raise ConfigProblem("backend", message)
    elif config.platform in _PLATFORM_BACKEND:
        if config.backend != _PLATFORM_BACKEND[config.platform]:
            raise _pair(config)
    elif not config.backend:
        raise ConfigProblem("platform", f"unexpected platform type '{config.platform}' for {config.name}")


def _pair(config: ModelConfig) -> ConfigProblem:
    message = f"unexpected 'platform' and 'backend' pair, got:{config.platform}, {config.backend}"
    return ConfigProblem("backend" if config.backend else "platform", message)


def fill_backend(config: ModelConfig, version_dir: Path | None) -> ModelConfig:
    """`config` with backend, platform and artifact file name filled in from each other and from `version_dir`.

    `version_dir` is the first version's folder, None when there is none. A model without any hint but a name of the
    form `x.<backend>` gets that backend; without that, INVALID_ARG in Triton's words.
    """
    if config.platform == ENSEMBLE_PLATFORM or (config.ensemble_scheduling is not None and not config.backend):
        return config.replace(platform=config.platform or ENSEMBLE_PLATFORM)
    fitting = [artifact for artifact in ARTIFACTS if _fits(artifact, config)]
    chosen = next(
        (artifact for artifact in fitting if version_dir and (version_dir / artifact.filename).exists()), None
    )
    if chosen is None and (config.backend or config.platform):
        chosen = fitting[0] if fitting else None
    if chosen is not None:
        return config.replace(
            backend=chosen.backend,
            platform=config.platform or chosen.platform,
            default_model_filename=config.default_model_filename or chosen.filename,
        )
    if config.backend or config.platform:
        return config
    backend = config.name.rpartition(".")[2] if "." in config.name else ""
    if not backend:
        raise invalid(
            f"Invalid model name: Could not determine backend for model '{config.name}' with no backend in model "
            "configuration. Expected model name of the form 'model.<backend_name>'."
        )
    return config.replace(backend=backend)


def _fits(artifact: DefaultArtifact, config: ModelConfig) -> bool:
    if config.backend == artifact.backend and not artifact.platform:
        return config.platform not in _PLATFORM_BACKEND
    return config.backend in ("", artifact.backend) and config.platform in ("", artifact.platform)

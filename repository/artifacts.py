"""What a model's files say about its backend: the table of default file names, and the filling in from it.

Source: Triton's default artifact names and its platform names (model repository documentation).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from repository.problem import ConfigProblem
from schemas.errors import invalid
from schemas.model_config import ModelConfig


class Artifact(NamedTuple):
    """The default file name of one kind of model, and the backend and platform ("" for none) that go with it."""

    filename: str
    backend: str
    platform: str


ARTIFACTS = (
    Artifact("model.plan", "tensorrt", "tensorrt_plan"),
    Artifact("model.onnx", "onnxruntime", "onnxruntime_onnx"),
    Artifact("model.xml", "openvino", ""),
    Artifact("model.pt", "pytorch", "pytorch_libtorch"),
    Artifact("model.pt2", "pytorch", "torch_aoti"),
    Artifact("model.py", "python", ""),
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


def _fits(artifact: Artifact, config: ModelConfig) -> bool:
    if config.backend == artifact.backend and not artifact.platform:
        return config.platform not in _PLATFORM_BACKEND
    return config.backend in ("", artifact.backend) and config.platform in ("", artifact.platform)

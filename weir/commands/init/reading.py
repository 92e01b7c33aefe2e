"""Reads a model's file for `weir init`: its format, its inputs and outputs, and the files that belong to it.

The backend reads the file in a process of its own: what a file breaks ends with that process, and its library (torch takes
seconds and 200 MB) is not imported here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from weir.errors import StartError
from weir.repository.completion import ARTIFACTS, DefaultArtifact, DescribedModel, DescribedTensor
from weir.repository.config_text import config_from_dict
from weir.repository.paths import check_relative
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError
from weir.schemas.core.tensors import BY_CONFIG_NAME, DATATYPES
from weir.worker.backend_api.interface import Backend, ModelVersion
from weir.worker.backends.isolation.backend import IsolatedBackend
from weir.worker.backends.onnxruntime.external_data import external_files
from weir.worker.backends.onnxruntime.trial import OnnxTrial
from weir.worker.backends.pytorch.programs import Format, format_of
from weir.worker.backends.pytorch.trial import TorchTrial
from weir.worker.backends.registry import built_in
from weir.worker.devices.gpus import WorkerDevices, find_gpus

SUFFIXES = {
    ".onnx": "model.onnx",
    ".pt": "model.pt",
    ".pth": "model.pt",
    ".pt2": "model.pt2",
    ".plan": "model.plan",
    ".engine": "model.plan",
}
"""The name in a version's folder of files with these suffixes."""


class Reading(NamedTuple):
    """What a file contains. `described` is None where it can't be read on this machine, for the reason `problem`.

    `companions` are further files that belong to it, relative to its folder.
    """

    artifact: DefaultArtifact
    described: DescribedModel | None
    problem: str = ""
    companions: Sequence[str] = ()


class GivenTensors(NamedTuple):
    """The inputs and outputs that the command line describes, for files that don't."""

    inputs: Sequence[DescribedTensor] = ()
    outputs: Sequence[DescribedTensor] = ()


NOT_GIVEN = GivenTensors()


def given_tensor(option: str, text: str) -> DescribedTensor:
    """The tensor that `NAME:DATATYPE:DIMS` describes ("x:FP32:-1,4"). Raises StartError."""
    name, _, rest = text.partition(":")
    kind, colon, shape = rest.partition(":")
    datatype = DATATYPES.get(kind.upper()) or BY_CONFIG_NAME.get(kind.upper())
    try:
        dims = [int(dim) for dim in shape.strip("[]").split(",") if dim.strip()]
    except ValueError:
        dims = [0]
    if not (name and colon and datatype and all(dim > 0 or dim == -1 for dim in dims)):
        raise StartError(
            f"{option} '{text}' must have the form NAME:DATATYPE:DIMS such as x:FP32:-1,4, with -1 for a variable "
            f"dimension and one of the datatypes {', '.join(DATATYPES)}"
        )
    return DescribedTensor(name, datatype.config_name, dims)


def read_model(file: Path, given: GivenTensors) -> Reading:
    """Reads a file. Raises StartError for one that is missing, of no known format, or broken."""
    artifact = _artifact(file)
    try:
        backend = _reader(artifact)
    except WeirError as error:
        return _given(artifact, given, error.message)
    ordinals = tuple(gpu.ordinal for gpu in find_gpus().gpus)
    available = backend.availability(WorkerDevices(ordinals, ordinals))
    if not available.runs_on:
        return _given(artifact, given, "; ".join(available.problems))
    if any(given) and _describes_itself(file, artifact):
        raise StartError(f"{file} describes its inputs and outputs itself: leave out --input and --output")
    try:
        companions = external_files(file) if artifact.backend == "onnxruntime" else []
        for companion in companions:
            check_relative(companion, "external data")
        if given.inputs and given.outputs and format_of(file) is not None:
            return _given(artifact, given, "")
        described = _describe(file, artifact, backend, given)
    except WeirError as error:
        raise StartError(f"{file} can't be read: {error.message}{_hint(file, artifact, given)}") from error
    except OSError as error:
        raise StartError(f"{file} can't be read: {error.strerror or error}") from error
    if not isinstance(described, DescribedModel):
        raise StartError(f"{file} can't be read: the backend '{artifact.backend}' does not describe it")
    return Reading(artifact, described, companions=companions)


def _artifact(file: Path) -> DefaultArtifact:
    name = SUFFIXES.get(file.suffix.lower())
    if name is None:
        raise StartError(f"{file} has the suffix '{file.suffix}', expected one of {', '.join(SUFFIXES)}")
    if not file.is_file():
        raise StartError(f"{file} is not a file")
    return next(artifact for artifact in ARTIFACTS if artifact.filename == name)


def _reader(artifact: DefaultArtifact) -> Backend:
    """What reads files of this format. Raises WeirError (UNAVAILABLE) if it can't run here."""
    backend = built_in(artifact.backend)
    if artifact.backend == "pytorch":
        return TorchTrial()
    return OnnxTrial() if artifact.backend == "onnxruntime" else backend


def _describes_itself(file: Path, artifact: DefaultArtifact) -> bool:
    return artifact.backend != "pytorch" or format_of(file) is Format.EXPORTED


def _describe(
    file: Path, artifact: DefaultArtifact, backend: Backend, given: GivenTensors
) -> DescribedModel | ModelConfig | None:
    declared = [{"name": row.name, "data_type": row.data_type, "dims": list(row.dims)} for row in given.inputs]
    # TensorRT's backend follows no link to another folder; external data lies beside the link to an ONNX model.
    place = file.resolve() if artifact.backend == "tensorrt" else file.absolute()
    config = config_from_dict(
        {"name": file.name, "backend": artifact.backend, "input": declared, "default_model_filename": place.name}
    )
    with tempfile.TemporaryDirectory(prefix="weir-init-") as folder:
        Path(folder, "1").symlink_to(place.parent)  # the version's folder
        return IsolatedBackend(backend).describe(ModelVersion(file.name, 1, Path(folder), config))


def _given(artifact: DefaultArtifact, given: GivenTensors, problem: str) -> Reading:
    described = DescribedModel(given.inputs, given.outputs) if given.inputs and given.outputs else None
    return Reading(artifact, described, problem)


def _hint(file: Path, artifact: DefaultArtifact, given: GivenTensors) -> str:
    if artifact.backend != "pytorch" or format_of(file) not in (Format.TORCHSCRIPT, Format.COMPILED):
        return ""
    if not given.inputs:
        return ": describe each, as --input NAME:DATATYPE:DIMS, such as --input x:FP32:-1,4"
    return " (it is not run if each output is described with --output, too)"

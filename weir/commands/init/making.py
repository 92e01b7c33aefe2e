"""What `weir init` does: from a file or a template to a model's folder, and what it prints."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weir.commands.init.configuration import Batching, choose_batching, config_text, effective, make_config
from weir.commands.init.folder import ModelFolder, Sample, write_folder
from weir.commands.init.reading import NOT_GIVEN, GivenTensors, read_model
from weir.errors import StartError
from weir.repository.completion import DefaultArtifact, DescribedModel, DescribedTensor
from weir.repository.paths import check_folder_name
from weir.repository.problems import ConfigProblem
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError
from weir.schemas.kserve.sample_inputs import (
    DEFAULT_VARIABLE_SIZE,
    declared_inputs,
    needs_binary_outputs,
    sample_body,
    sample_tensors,
)
from weir.worker.backends.registry import BACKENDS

TEMPLATES = {"python": "model.py", "backend": "backend.py"}
"""The file of each template."""

_TEMPLATE_FOLDER = Path(__file__).with_name("templates")
_TEMPLATE_TENSORS = DescribedModel(
    [DescribedTensor("INPUT", "TYPE_FP32", [-1, 4])], [DescribedTensor("OUTPUT", "TYPE_FP32", [-1, 4])]
)

_UNREAD = (
    "The inputs and outputs are not listed, because the file could not be read where this was made: {problem}\nThe server "
    "adds them, and the size of batches, when it loads the model."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InitRequest:
    """The arguments of `weir init`: exactly one of `file` and `template` is set. `name` "" is that of the file."""

    file: Path | None = None
    template: str = ""
    name: str = ""
    repository: Path = Path("models")
    given: GivenTensors = NOT_GIVEN
    max_batch_size: int | None = None
    links: bool = False
    replaces: bool = False
    is_dry: bool = False


def make(request: InitRequest) -> Iterator[str]:
    """Makes the folder, and yields what to print. Raises StartError."""
    try:
        name = request.name or _name_of(request)
        check_folder_name(name)
        folder, notes = (
            _from_template(request, name) if request.file is None else _from_file(request, request.file, name)
        )
    except (ConfigProblem, WeirError) as error:
        raise StartError(error.message) from error
    target = request.repository / name
    if request.is_dry:
        yield f"{target} would have these files:"
    else:
        write_folder(folder, request.repository, links=request.links, replaces=request.replaces)
        yield f"{target} has these files:"
    origin = f"the template '{request.template}'" if request.template else ""
    for path, source in folder.copies.items():
        yield f"  {path}  {'linked' if request.links else 'copied'} from {origin or source}"
    yield from (f"  {path}" for path in folder.texts)
    yield from notes
    if request.is_dry:
        yield f"\nconfig.pbtxt would be:\n\n{folder.config.rstrip()}"
        return
    yield from _next_commands(request.repository, target, folder)


def _name_of(request: InitRequest) -> str:
    """A name for the model from that of its file: `model.onnx` has the name of its folder."""
    if request.file is None:
        raise StartError("a template needs a name for its model: --name NAME")
    file = request.file.absolute()
    stem = file.parent.name if file.stem == "model" and not file.parent.name.isdigit() else file.stem
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", stem).lstrip(".-") or "model"


def _from_file(request: InitRequest, file: Path, name: str) -> tuple[ModelFolder, list[str]]:
    reading = read_model(file, request.given)
    artifact, described = reading.artifact, reading.described
    copies = {f"1/{artifact.filename}": file}
    copies |= {f"1/{companion}": file.parent / companion for companion in reading.companions}
    comment = f"Made by `weir init` from {file.name}."
    if described is None:
        return _unread(name, artifact, copies, f"{comment}\n{_UNREAD.format(problem=reading.problem)}", request)
    batching = choose_batching(described, request.max_batch_size)
    config = make_config(name, artifact, described, batching)
    return _complete(config, described, copies, comment, batching)


def _unread(
    name: str, artifact: DefaultArtifact, copies: dict[str, Path], comment: str, request: InitRequest
) -> tuple[ModelFolder, list[str]]:
    largest = request.max_batch_size
    batching = None if largest is None else Batching(largest, "As --max-batch-size asks.")
    config = ModelConfig(name=name, backend=artifact.backend, max_batch_size=largest or 0)
    text = config_text(config, comment, batching)
    note = f"note: it has no sample request, because {comment.partition('because ')[2].partition(chr(10))[0]}"
    return ModelFolder(name, text, None, copies), [note]


def _from_template(request: InitRequest, name: str) -> tuple[ModelFolder, list[str]]:
    file = TEMPLATES[request.template]
    backend = name if request.template == "backend" else request.template
    if request.template == "backend" and name in BACKENDS:
        raise StartError(f"a model with a backend of its own can't be called {name}, which is one of Weir's backends")
    batching = choose_batching(_TEMPLATE_TENSORS, request.max_batch_size)
    config = make_config(name, DefaultArtifact(file, backend, ""), _TEMPLATE_TENSORS, batching)
    comment = (
        f"Made by `weir init` from the template '{request.template}': change {file} and the tensors below together."
    )
    copies = {f"1/{file}": _TEMPLATE_FOLDER / request.template / file}
    return _complete(config, _TEMPLATE_TENSORS, copies, comment, batching)


def _complete(
    config: ModelConfig, described: DescribedModel, copies: dict[str, Path], comment: str, batching: Batching
) -> tuple[ModelFolder, list[str]]:
    text = config_text(config, comment, batching)
    served = effective(text, described)
    notes = [f"Largest batch {batching.largest}: {batching.reason}" if batching.largest else batching.reason]
    try:
        sample: Sample | None = _sample(served, described.tried_size or DEFAULT_VARIABLE_SIZE)
    except WeirError as error:
        sample = None
        notes.append(f"note: it has no sample request: {error.message}")
    return ModelFolder(config.name, text, sample, copies), notes


def _sample(config: ModelConfig, variable_size: int) -> Sample:
    """A request for the model. Raises WeirError if it would be too large."""
    tensors = sample_tensors(declared_inputs(config), variable_size=variable_size)
    body, json_length = sample_body(tensors, wants_binary=needs_binary_outputs(config))
    if json_length is None:
        return Sample("sample.json", body + b"\n", None)
    return Sample("sample.bin", body, json_length)


def _next_commands(repository: Path, target: Path, folder: ModelFolder) -> Iterator[str]:
    yield f"\nServe it:\n  weir serve --model-repository={shlex.quote(str(repository))}"
    if folder.sample is None:
        return
    sample = folder.sample
    url = f"http://localhost:8000/v2/models/{folder.name}/infer"
    body = shlex.quote(f"@{target / sample.file}")
    if sample.json_length is None:
        asking = f"weir infer {folder.name} --data={shlex.quote(str(target / sample.file))}"
        yield f"\nSend the sample request, by either command:\n  {asking}\n  curl -s {url} -d {body}"
    else:
        header = f"-H Inference-Header-Content-Length:{sample.json_length}"
        yield f"\nSend the sample request:\n  curl -s {url} {header} --data-binary {body} -o response.bin"

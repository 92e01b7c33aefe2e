"""From a folder to a configuration that can be served: the two calls that a worker makes around its backend.

    found = ModelRepository(paths).find(name)
    source = read_config(found)
    described = backend.describe(...)         # None without it, or under --disable-auto-complete-config
    config = resolve_config(source, described, gpu_ids)
    versions = select_versions(config, found.versions)

Errors of the configuration name the file, the line and the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weir.repository.completion import DEFAULT_MAX_BATCH_SIZE, DescribedModel, complete, fill_backend, normalize
from weir.repository.config_text import config_from_json, located, parse_config
from weir.repository.layout import FoundModel
from weir.repository.paths import MAX_CONFIG_BYTES, path_inside, read_small_file
from weir.repository.problems import ConfigProblem
from weir.repository.scheduler_rules import check_ensemble
from weir.repository.validation import check_written_scalars, validate
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import invalid, unavailable


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """A configuration as its author wrote it, plus name and backend; `file` and `text` are for pointing at lines.

    `file` is relative to the repository, "" where the configuration came with a load request or there is none.
    """

    config: ModelConfig
    file: str = ""
    text: str = ""


def read_config(found: FoundModel, override: str | None = None) -> ConfigSource:
    """The configuration of `found`, or of the JSON `override` of a load request in its place.

    Name and backend are filled in; nothing else is completed or checked. Raises WeirError: UNAVAILABLE for a model with
    a known problem, INVALID_ARG for a broken configuration.
    """
    if found.problem:
        raise unavailable(found.problem)
    source = ConfigSource(config_from_json(override)) if override is not None else _read_file(found)
    try:
        return ConfigSource(_identify(source.config, found), source.file, source.text)
    except ConfigProblem as problem:
        raise located(problem, source.file, source.text) from problem


def _read_file(found: FoundModel) -> ConfigSource:
    if not found.config_file:
        return ConfigSource(ModelConfig())
    file = f"{found.name}/{found.config_file}"
    try:
        data = config_bytes(found)
    except OSError as error:
        raise invalid(f"failed to read {file}: {error.strerror}") from error
    return ConfigSource(parse_config(data, file), file, data.decode("utf-8-sig"))


def config_bytes(found: FoundModel) -> bytes:
    """The content of the configuration file. Raises OSError, and ConfigProblem for a link that leads out of the folder."""
    return read_small_file(path_inside(found.path, found.config_file), MAX_CONFIG_BYTES)


def _identify(config: ModelConfig, found: FoundModel) -> ModelConfig:
    if config.name not in ("", found.name) and not found.is_registered:
        check_ensemble(config)  # as in Triton, before the name
        raise ConfigProblem(
            "name",
            f"unexpected directory name '{found.name}' for model '{config.name}', directory name must equal model name",
        )
    first_version = found.version_dir(found.versions[0]) if found.versions else None
    try:
        return fill_backend(config.replace(name=found.name), first_version)
    except OSError as error:
        message = f"failed to read version {found.versions[0]} of model '{found.name}': {error.strerror}"
        raise ConfigProblem("", message) from error


def resolve_config(
    source: ConfigSource,
    described: DescribedModel | None,
    gpu_ids: Sequence[int],
    default_max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
    backend_uses_gpus: bool = True,
) -> ModelConfig:
    """The configuration to serve: completed from the backend's description, defaults written out, and checked.

    Instance groups without a kind get GPUs if there are `gpu_ids` and `backend_uses_gpus`, otherwise the CPU.
    Raises WeirError(INVALID_ARG) that names the field, and the file and line where there is a file.
    """
    try:
        completed = complete(source.config, described, default_max_batch_size)
        config = normalize(completed, gpu_ids, backend_uses_gpus)
        check_written_scalars(source.config, config.max_batch_size)
        validate(config, gpu_ids)
    except ConfigProblem as problem:
        raise located(problem, source.file, source.text) from problem
    return config

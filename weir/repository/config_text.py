"""`config.pbtxt` and its relatives: text, JSON and protobuf forms of a `ModelConfig`.

Protobuf's own parsers read them, with the description of `model_config.proto`. A parse error becomes an error that
names the file, the line and the field.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format, text_format
from pydantic import ValidationError

from weir.repository.paths import MAX_CONFIG_BYTES
from weir.repository.problems import ConfigProblem, field_positions, position_of
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.kserve.triton_messages import model_config

_DESCRIPTOR = model_config.ModelConfig.DESCRIPTOR


def parse_config(data: bytes, file: str) -> ModelConfig:
    """The configuration in protobuf's text format.

    `file` is the name for errors, relative to the repository. Raises WeirError(INVALID_ARG) that reads
    `<file>:<line>:<column>: field '<path>': <reason>`.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1
        raise _broken(file, before.decode("utf-8", "replace"), line, column, "the file is not UTF-8 text") from error
    message = model_config.ModelConfig()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        line, column = error.GetLine() or 1, error.GetColumn() or 1
        raise _broken(file, text, line, column, _reason(error, text, line)) from error
    try:
        return config_from_message(message)
    except ConfigProblem as problem:
        raise located(problem, file, text) from problem


def _broken(file: str, text: str, line: int, column: int, reason: str) -> WeirError:
    field = ""
    for position in field_positions(text, _DESCRIPTOR):
        if (position.line, position.column) > (line, column):
            break
        field = position.path
    return invalid(f"{file}:{line}:{column}: field '{field or 'ModelConfig'}': {reason}")


def _reason(error: text_format.ParseError, text: str, line: int) -> str:
    # Protobuf's text is "<line>:<column> : '<the whole line>': <reason>"; the position is reported separately.
    lines = text.split("\n")
    reason = str(error).partition(" : ")[2]
    quoted = lines[line - 1] if line <= len(lines) else ""
    return reason.removeprefix(f"'{quoted}': ").removeprefix("'': ")


def located(problem: ConfigProblem, file: str = "", text: str = "") -> ConfigProblem:
    """`problem` with its field, and the place of the field in `text`, added to the message."""
    field = problem.field or "ModelConfig"
    if not file:
        return ConfigProblem(problem.field, f"{problem.message} (field '{field}')")
    position = position_of(problem.field, text, _DESCRIPTOR)
    place = f"{file}:{position.line}" if position else file
    return ConfigProblem(problem.field, f"{problem.message} ({place}, field '{field}')")


def config_from_message(message: Any) -> ModelConfig:
    """The configuration in a protobuf `ModelConfig` message. Raises ConfigProblem for enum values without a name."""
    return _validated(json_format.MessageToDict(message, preserving_proto_field_name=True))


def config_to_message(config: ModelConfig) -> Any:
    """The protobuf `ModelConfig` message of `config`, as gRPC's ModelConfig returns it."""
    return json_format.ParseDict(config.model_dump(exclude_defaults=True), model_config.ModelConfig())


def config_to_text(config: ModelConfig) -> str:
    """`config` in protobuf's text format."""
    return str(text_format.MessageToString(config_to_message(config), use_short_repeated_primitives=True))


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """The body of Triton's `/config` endpoint: the proto's names, all defaults, numbers for 64-bit integers.

    As in protobuf's JSON, absent messages and oneof members are left out, and map keys are strings.
    """
    return config.model_dump(exclude_none=True)


def config_from_json(text: str) -> ModelConfig:
    """The configuration in protobuf's JSON form, as load requests bring it.

    Raises WeirError(INVALID_ARG) that begins with Triton's "Invalid config override: ".
    """
    if len(text) > MAX_CONFIG_BYTES:
        raise invalid(f"Invalid config override: it has {len(text)} characters, at most {MAX_CONFIG_BYTES} are allowed")
    if not text.lstrip().startswith("{"):  # protobuf takes an empty list for an empty message
        raise invalid("Invalid config override: expected a JSON object")
    message = model_config.ModelConfig()
    try:
        json_format.Parse(text, message)
        return config_from_message(message)
    except json_format.ParseError as error:
        raise invalid(f"Invalid config override: {error}") from error
    except ConfigProblem as problem:
        raise invalid(f"Invalid config override: {located(problem).message}") from problem


def config_from_dict(fields: dict[str, Any]) -> ModelConfig:
    """The configuration in a dict of proto names, such as a Python model's auto-completion. Raises ConfigProblem."""
    return _validated(fields)


def _validated(fields: dict[str, Any]) -> ModelConfig:
    try:
        return ModelConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigProblem(_path(first["loc"]), first["msg"]) from error


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path.removeprefix(".")

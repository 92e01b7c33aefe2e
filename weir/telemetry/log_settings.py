"""`LogSettings`: how log settings are read, merged and reported. Source: Triton's logging extension, Triton 2.51."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from weir.schemas.core.errors import ErrorCode, WeirError, internal, invalid, unavailable

DEFAULT, ISO8601, JSON = "default", "ISO8601", "json"
FORMATS = (DEFAULT, ISO8601, JSON)
"""The layouts of log entries. JSON is an addition to Triton's; only the command line can select it."""

_SWITCHES = ("log_info", "log_warning", "log_error")

Changes = dict[str, Any]
"""Fields of `LogSettings` with new values."""


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """The log options of a role's command line, a base of the settings of each role.

    `log_format` is one of `FORMATS` or "text", `log_file` a path or "" for standard error, `log_verbose` 0 for no details.
    """

    log_format: str = DEFAULT
    log_file: str = ""
    log_verbose: int = 0
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is logged, how and where. The fields have Triton's names and order.

    `log_file` is "" for standard error. Details are logged from `log_verbose_level` 1 on.
    """

    log_file: str = ""
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: str = DEFAULT

    @classmethod
    def of(cls, options: LogOptions) -> Self:
        """Creates the settings of the command line. Raises ValueError for an unknown format."""
        log_format = DEFAULT if options.log_format == "text" else options.log_format
        if log_format not in FORMATS:
            raise ValueError(f"log format must be {', '.join(FORMATS)} or text, not {log_format!r}")
        return cls(
            options.log_file,
            options.log_info,
            options.log_warning,
            options.log_error,
            options.log_verbose,
            log_format,
        )

    def changed(self, changes: Changes) -> LogSettings:
        """Returns a copy with `changes` applied."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, str | bool | int]:
        """Returns the settings as clients receive them."""
        return asdict(self)


def changes_of_json(document: Any) -> Changes:
    """Returns the changes of a JSON body. Like Triton, it ignores a body that is not an object, nulls and unknown names.

    Raises WeirError with Triton's codes and texts.
    """
    if not isinstance(document, dict):
        return {}
    given = {name: value for name, value in document.items() if value is not None}
    if "log_file" in given:
        raise _file_is_fixed()
    changes: Changes = {}
    for name in _SWITCHES:
        if name in given:
            if not isinstance(given[name], bool):
                raise internal("attempt to access JSON non-boolean as boolean")
            changes[name] = given[name]
    if "log_verbose_level" in given:
        changes["log_verbose_level"] = _level_of_json(given["log_verbose_level"])
    if "log_format" in given:
        changes["log_format"] = _format_of_json(given["log_format"])
    return changes


def _level_of_json(level: Any) -> int:
    if type(level) is not int or level < 0:
        raise internal("attempt to access JSON non-unsigned-integer as unsigned-integer")
    return _level(level)


def _format_of_json(log_format: Any) -> str:
    if not isinstance(log_format, str):
        raise internal("attempt to access JSON non-string as string")
    if log_format not in (DEFAULT, ISO8601):
        raise unavailable(f"invalid argument for --log_format, got: {log_format}")
    return log_format


def changes_of_values(settings: Mapping[str, tuple[str | None, Any]]) -> Changes:
    """Like `changes_of_json` for gRPC, where each setting is (name of the message's field, value)."""
    if "log_file" in settings:
        raise _file_is_fixed()
    changes: Changes = {}
    for name in _SWITCHES:
        if name in settings:
            changes[name] = _of_kind(name, settings[name], "bool_param", "boolean")
    if "log_verbose_level" in settings:
        level = _of_kind("log_verbose_level", settings["log_verbose_level"], "uint32_param", "int32")
        changes["log_verbose_level"] = _level(level)
    if "log_format" in settings:
        log_format = _of_kind("log_format", settings["log_format"], "string_param", "string")
        if log_format not in (DEFAULT, ISO8601):
            raise invalid(f"invalid argument for log_format, got: {log_format}")
        changes["log_format"] = log_format
    return changes


def pack_changes(changes: Changes) -> bytes:
    """Returns changes as they are stored in the bucket."""
    return json.dumps(changes).encode()


def unpack_changes(data: bytes) -> Changes:
    """Returns changes from the bucket. Raises ValueError if they are malformed."""
    changes = json.loads(data)
    if not isinstance(changes, dict) or not changes.keys() <= {*_SWITCHES, "log_verbose_level", "log_format"}:
        raise ValueError("malformed log settings: unknown fields")
    level = changes.get("log_verbose_level", 0)
    if (
        any(type(changes[name]) is not bool for name in _SWITCHES if name in changes)
        or type(level) is not int
        or not 0 <= level < 2**31
        or changes.get("log_format", DEFAULT) not in FORMATS
    ):
        raise ValueError("malformed log settings: a value has the wrong type")
    return changes


def _level(number: int) -> int:
    # Triton stores it as a signed 32-bit number, and treats negative ones as 0.
    number %= 2**32
    return number if number < 2**31 else 0


def _of_kind(name: str, setting: tuple[str | None, Any], field: str, kind: str) -> Any:
    if setting[0] != field:
        raise invalid(f"expect {kind} for '{name}'")
    return setting[1]


def _file_is_fixed() -> WeirError:
    return WeirError(ErrorCode.UNSUPPORTED, "log file location can not be updated through network protocol")

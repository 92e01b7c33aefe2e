"""The rules of log settings: how they are read, merged and told. Source: Triton's logging extension, and Triton 2.51."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, Self

from schemas.errors import ErrorCode, WeirError, internal, invalid, unavailable

DEFAULT, ISO8601, JSON = "default", "ISO8601", "json"
FORMATS = (DEFAULT, ISO8601, JSON)
"""The layouts of entries. JSON is ours: it can be had from the command line only, as clients know nothing of it."""

_SWITCHES = ("log_info", "log_warning", "log_error")

Changes = dict[str, Any]
"""Fields of `LogSettings` with new values."""


class Options(Protocol):
    """What a role is told of its log on the command line."""

    @property
    def log_format(self) -> str:
        """One of `FORMATS`, or "text"."""
        ...

    @property
    def log_file(self) -> str:
        """A path, or ""."""
        ...

    @property
    def log_verbose(self) -> int:
        """0 for no details."""
        ...

    @property
    def log_info(self) -> bool:
        """Whether news are logged."""
        ...

    @property
    def log_warning(self) -> bool:
        """Whether warnings are."""
        ...

    @property
    def log_error(self) -> bool:
        """Whether errors are."""
        ...


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is logged, how and where; fields have Triton's names, and are told in its order.

    `log_file` is "" for standard error. Details are logged from `log_verbose_level` 1 on.
    """

    log_file: str = ""
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: str = DEFAULT

    @classmethod
    def of(cls, options: Options) -> Self:
        """As the command line has them. Raises ValueError for a format that is none."""
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
        """These with some changed."""
        return replace(self, **changes)

    def told(self) -> dict[str, str | bool | int]:
        """As clients are told them."""
        return asdict(self)


def changes_of_json(document: Any) -> Changes:
    """The changes that a JSON body asks for. What is no object, is null or unknown is ignored, as by Triton.

    Raises WeirError with Triton's codes and texts.
    """
    if not isinstance(document, dict):
        return {}
    asked = {name: value for name, value in document.items() if value is not None}
    if "log_file" in asked:
        raise _file_is_fixed()
    changes: Changes = {}
    for name in _SWITCHES:
        if name in asked:
            if not isinstance(asked[name], bool):
                raise internal("attempt to access JSON non-boolean as boolean")
            changes[name] = asked[name]
    level = asked.get("log_verbose_level")
    if level is not None:
        if type(level) is not int or level < 0:
            raise internal("attempt to access JSON non-unsigned-integer as unsigned-integer")
        changes["log_verbose_level"] = _level(level)
    log_format = asked.get("log_format")
    if log_format is not None:
        if not isinstance(log_format, str):
            raise internal("attempt to access JSON non-string as string")
        if log_format not in (DEFAULT, ISO8601):
            raise unavailable(f"invalid argument for --log_format, got: {log_format}")
        changes["log_format"] = log_format
    return changes


def changes_of_values(settings: Mapping[str, tuple[str | None, Any]]) -> Changes:
    """As `changes_of_json`, for gRPC's form: each setting as (which field of the message it came in, value)."""
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
    """Changes as they lie in the bucket."""
    return json.dumps(changes).encode()


def unpack_changes(data: bytes) -> Changes:
    """Changes from the bucket. Raises ValueError for what is none."""
    changes = json.loads(data)
    if not isinstance(changes, dict) or not changes.keys() <= {*_SWITCHES, "log_verbose_level", "log_format"}:
        raise ValueError("not log settings")
    level = changes.get("log_verbose_level", 0)
    if (
        any(type(changes[name]) is not bool for name in _SWITCHES if name in changes)
        or type(level) is not int
        or not 0 <= level < 2**31
        or changes.get("log_format", DEFAULT) not in FORMATS
    ):
        raise ValueError("not log settings: wrong types")
    return changes


def _level(number: int) -> int:
    # Triton keeps it as a signed 32-bit number, and takes one below 0 for 0.
    number %= 2**32
    return number if number < 2**31 else 0


def _of_kind(name: str, setting: tuple[str | None, Any], field: str, kind: str) -> Any:
    if setting[0] != field:
        raise invalid(f"expect {kind} for '{name}'")
    return setting[1]


def _file_is_fixed() -> WeirError:
    return WeirError(ErrorCode.UNSUPPORTED, "log file location can not be updated through network protocol")

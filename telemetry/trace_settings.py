"""The rules of trace settings: how they are read, which hold for a model, and how they are told.

There is a global setting, and one for each model that was given any of its own; what a model was not given follows the
global one, and what the global one was not given is the command line's. Nothing here knows a door or the bus.

Source: Triton's trace extension, its `--trace-config` option, and what Triton 2.51 answers. Numbers are read as C++'s
`std::stoi` reads them, which is what Triton does: blanks before and letters behind a number are no error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas.errors import ErrorCode, WeirError, internal, invalid

TIMESTAMPS, TENSORS = "TIMESTAMPS", "TENSORS"
LEVELS = (TIMESTAMPS, TENSORS)
"""Levels in the order in which they are told; none of them is "OFF"."""

TRITON, OPENTELEMETRY = "triton", "opentelemetry"
MODES = (TRITON, OPENTELEMETRY)

DEFAULT_URL = "http://localhost:4318/v1/traces"
_BATCH_DEFAULTS = {"bsp_max_queue_size": 2048, "bsp_schedule_delay": 5000, "bsp_max_export_batch_size": 512}

_FIELDS = ("trace_level", "trace_rate", "trace_count", "log_frequency")
_LARGEST = {"trace_rate": (0, 2**32 - 1), "trace_count": (-1, 2**31 - 1), "log_frequency": (0, 2**32 - 1)}

_NUMBER = re.compile(r"[ \t\n\v\f\r]*([+-]?[0-9]+)")

Overrides = dict[str, Any]
"""What one setting was given of its own: `trace_level` (a list of levels) and the three numbers, each where it was."""

Changes = dict[str, Any]
"""`Overrides` that were asked for; None takes one back."""


@dataclass(frozen=True, slots=True)
class TraceSetting:
    """What holds: the levels ("OFF" is none), every how many requests are traced (0: only those whose caller traces),
    how many more are traced (-1: no end), and how many traces share a file (0: all).
    """

    levels: tuple[str, ...] = ()
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """What the command line says of tracing.

    `file` is where mode "triton" writes. In mode "opentelemetry" traces go to `url`, in batches as `batches` says (by
    the names of Triton's options; the delay is in milliseconds), as of a resource with these attributes.
    """

    mode: str = TRITON
    initial: TraceSetting = TraceSetting()
    file: str = ""
    url: str = DEFAULT_URL
    resource: Mapping[str, str] = field(default_factory=dict)
    batches: Mapping[str, int] = field(default_factory=lambda: dict(_BATCH_DEFAULTS))
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, values: Iterable[str]) -> TraceConfig:
        """What the values of `--trace-config` say, each `<setting>=<value>` or `<mode>,<setting>=<value>`.

        Raises ValueError for what is not one.
        """
        found: dict[str, Any] = {}
        setting: Overrides = {}
        levels: list[str] = []
        resource: dict[str, str] = {}
        batches = dict(_BATCH_DEFAULTS)
        options: dict[str, str] = {}
        for value in values:
            mode, name, text = _split_option(value)
            try:
                if (mode, name) == ("", "mode") and text in MODES:
                    found["mode"] = text
                elif (mode, name) == ("", "level") and text in ("OFF", *LEVELS):
                    levels.append(text)
                elif (mode, name) in (("", "rate"), ("", "count")):
                    setting[f"trace_{name}"] = _number(f"trace_{name}", text)
                elif (mode, name) == (TRITON, "file"):
                    found["file"] = text
                elif (mode, name) == (TRITON, "log-frequency"):
                    setting["log_frequency"] = _number("log_frequency", text)
                elif mode == OPENTELEMETRY and name in ("url", "resource", *_BATCH_DEFAULTS):
                    options[name] = text
                    if name == "url":
                        found["url"] = text
                    elif name == "resource":
                        key, equals, attribute = text.partition("=")
                        if not equals:
                            raise ValueError(f"--trace-config resource must be <key>=<value>, not '{text}'")
                        resource[key] = attribute
                    else:
                        batches[name] = _batch_size(name, text)
                else:
                    raise ValueError(f"--trace-config has no '{value}'")
            except WeirError as error:
                raise ValueError(f"--trace-config {value}: {error.message}") from error
        if batches["bsp_max_export_batch_size"] > batches["bsp_max_queue_size"]:
            raise ValueError("--trace-config bsp_max_export_batch_size must not exceed bsp_max_queue_size")
        if "OFF" in levels and len(levels) > 1:
            raise ValueError("--trace-config level=OFF excludes other levels")
        if levels:
            setting["trace_level"] = [level for level in LEVELS if level in levels]
        told = {**{name: str(number) for name, number in _BATCH_DEFAULTS.items()}, **options}
        return cls(
            initial=_with(TraceSetting(), setting),
            resource=resource,
            batches=batches,
            options=tuple((name, told[name]) for name in ("url", "resource", *_BATCH_DEFAULTS) if name in told),
            **found,
        )


class TraceSettings:
    """The global setting ("") and those of models, over what the command line says."""

    def __init__(self, config: TraceConfig) -> None:
        self.config = config
        self._overrides: dict[str, Overrides] = {}

    def setting(self, model: str = "") -> TraceSetting:
        """What holds for a model, or globally ("")."""
        setting = _with(self.config.initial, self._overrides.get("", {}))
        return _with(setting, self._overrides.get(model, {})) if model else setting

    def models(self) -> list[str]:
        """The models with a setting of their own."""
        return [model for model in self._overrides if model]

    def changed(self, model: str, changes: Changes) -> Overrides:
        """What the setting of a model (or the global one, "") is given of its own once `changes` are made."""
        merged = {**self._overrides.get(model, {}), **changes}
        return {name: value for name, value in merged.items() if value is not None}

    def replace(self, model: str, overrides: Overrides) -> None:
        """Gives a setting these and no others."""
        if overrides:
            self._overrides[model] = overrides
        else:
            self._overrides.pop(model, None)

    def told(self, model: str, remaining: int) -> dict[str, str | list[str]]:
        """A setting in Triton's form and order; `remaining` is how many more requests are traced."""
        setting, config = self.setting(model), self.config
        answer: dict[str, str | list[str]] = {
            "trace_level": list(setting.levels) or ["OFF"],
            "trace_rate": str(setting.rate),
            "trace_count": str(remaining),
        }
        if config.mode == TRITON:
            return answer | {
                "log_frequency": str(setting.log_frequency),
                "trace_file": config.file,
                "trace_mode": TRITON,
            }
        return answer | {"trace_mode": config.mode} | dict(config.options)


def changes_of_json(document: Any) -> Changes:
    """The changes that a JSON body asks for. What is no object, and what it does not know, it ignores, as Triton does.

    Raises WeirError with Triton's codes and texts.
    """
    if not isinstance(document, dict):
        return {}
    if "trace_file" in document:
        raise _file_is_fixed()
    changes: Changes = {}
    for name in _FIELDS:
        if name not in document:
            continue
        value = document[name]
        if value is None:
            changes[name] = None
        elif name == "trace_level":
            if not isinstance(value, list):
                raise internal("attempt to access JSON non-array as array")
            changes |= _levels([_text(level) for level in value])
        else:
            changes[name] = _number(name, _text(value))
    return changes


def changes_of_lists(settings: Mapping[str, Sequence[str]]) -> Changes:
    """As `changes_of_json`, for gRPC's form: each setting a list of values, empty to take it back."""
    if "trace_file" in settings:
        raise _file_is_fixed()
    changes: Changes = {}
    for name in _FIELDS:
        if name not in settings:
            continue
        values = settings[name]
        if not values:
            changes[name] = None
        elif name == "trace_level":
            changes |= _levels(values)
        elif len(values) > 1:
            raise invalid(f"expect only 1 value for '{name}'")
        else:
            changes[name] = _number(name, values[0], " ")
    return changes


def pack_overrides(overrides: Overrides) -> bytes:
    """Overrides as they lie in the bucket."""
    return json.dumps(overrides).encode()


def unpack_overrides(data: bytes) -> Overrides:
    """Overrides from the bucket. Raises ValueError for what is none."""
    overrides = json.loads(data)
    if not isinstance(overrides, dict) or not overrides.keys() <= set(_FIELDS):
        raise ValueError("not trace settings")
    for name, value in overrides.items():
        if name == "trace_level":
            if not isinstance(value, list) or [level for level in LEVELS if level in value] != value:
                raise ValueError("not trace levels")
        elif type(value) is not int or not _LARGEST[name][0] <= value <= _LARGEST[name][1]:
            raise ValueError(f"not a {name}")
    return overrides


def _with(setting: TraceSetting, overrides: Overrides) -> TraceSetting:
    return TraceSetting(
        tuple(overrides.get("trace_level", setting.levels)),
        overrides.get("trace_rate", setting.rate),
        overrides.get("trace_count", setting.count),
        overrides.get("log_frequency", setting.log_frequency),
    )


def _levels(names: Sequence[str]) -> Changes:
    if "OFF" in names:
        if len(names) > 1:
            raise invalid("Expect only one trace level 'OFF' is specified")
        return {"trace_level": []}
    known = [level for level in LEVELS if level in names]
    return {"trace_level": known} if known else {}


def _number(name: str, text: str, blank: str = "") -> int:
    # `blank` is what Triton's gRPC door writes in one of the texts where its HTTP door does not.
    match = _NUMBER.match(text)
    if match is None:
        raise invalid(f"Unable to parse '{name}', got: {text}")
    number = int(match[1]) if len(match[1]) < 20 else 2**63
    least, largest = _LARGEST[name]
    if not -(2**31) <= number < 2**31:
        raise invalid(f"Unable to parse '{name}', value is out of range [ {least}, {largest} ], got: {text}")
    if name == "trace_count":
        if number < -1:
            raise invalid(f"Unable to parse 'trace_count'. Expecting value >= -1, got:{blank}{text}")
        return number
    return number % 2**32


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise internal("attempt to access JSON non-string as string")
    return value


def _file_is_fixed() -> WeirError:
    return WeirError(ErrorCode.UNSUPPORTED, "trace file location can not be updated through network protocol")


def _split_option(value: str) -> tuple[str, str, str]:
    head, equals, text = value.partition("=")
    mode, comma, name = head.rpartition(",")
    if not equals or not name or (comma and mode not in MODES):
        raise ValueError(
            f"--trace-config option format is '<mode>,<setting>=<value>' or '<setting>=<value>'. Got {value}"
        )
    return mode, name, text


def _batch_size(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text[:10]) < 2**31):
        raise ValueError(f"--trace-config {name} must be a positive number, not '{text}'")
    return int(text)

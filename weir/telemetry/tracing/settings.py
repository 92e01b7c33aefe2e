"""Trace settings: how they are read, which apply to a model, how they are reported, and which requests they sample.

There is a global setting, and one for each model with values of its own. A model's missing values follow the global
setting, and those follow the command line.

Source: Triton's trace extension, its `--trace-config` option, and the responses of Triton 2.51. Numbers are parsed
like C++'s `std::stoi`, as in Triton: blanks before and letters behind a number are accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weir.runtime.extras import is_installed, missing_extra
from weir.schemas.core.errors import ErrorCode, WeirError, internal, invalid

TIMESTAMPS, TENSORS = "TIMESTAMPS", "TENSORS"
LEVELS = (TIMESTAMPS, TENSORS)
"""The trace levels, in the order in which they are reported; none of them is reported as "OFF"."""

_USER = re.compile(r"(?<=://)[^\s/]*@")

TRITON, OPENTELEMETRY = "triton", "opentelemetry"
MODES = (TRITON, OPENTELEMETRY)

DEFAULT_URL = "http://localhost:4318/v1/traces"
_BATCH_DEFAULTS = {"bsp_max_queue_size": 2048, "bsp_schedule_delay": 5000, "bsp_max_export_batch_size": 512}

_FIELDS = ("trace_level", "trace_rate", "trace_count", "log_frequency")
_LARGEST = {"trace_rate": (0, 2**32 - 1), "trace_count": (-1, 2**31 - 1), "log_frequency": (0, 2**32 - 1)}

_NUMBER = re.compile(r"[ \t\n\v\f\r]*([+-]?[0-9]+)")

Overrides = dict[str, Any]
"""The own values of one setting: `trace_level` (a list of levels) and the three numbers, each only if set."""

Changes = dict[str, Any]
"""`Overrides` to be set; None removes a value."""


@dataclass(frozen=True, slots=True)
class TraceSetting:
    """An effective setting.

    `levels` may be empty ("OFF"). Every `rate`-th request is traced (0: only those whose caller traces), `count` more
    in all (-1: no limit), and `log_frequency` traces share a file (0: all).
    """

    levels: tuple[str, ...] = ()
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """The trace options of the command line.

    `file` is the output of mode "triton". In mode "opentelemetry" traces are sent to `url`, in batches configured by
    `batches` (with the names of Triton's options; the delay is in milliseconds), with the attributes `resource`.
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
        """Parses the values of `--trace-config`, each `<setting>=<value>` or `<mode>,<setting>=<value>`. Raises
        ValueError.
        """
        options = _ConfigOptions()
        for value in values:
            mode, name, text = _split_option(value)
            try:
                is_known = options.add_general(name, text) if not mode else options.add_of_mode(mode, name, text)
            except WeirError as error:
                raise ValueError(f"--trace-config {value}: {error.message}") from error
            if not is_known:
                raise ValueError(f"--trace-config: unknown setting or value '{_without_user(value)}'")
        return options.config()


class _ConfigOptions:
    """The values of `--trace-config` while they are parsed. The methods raise ValueError or WeirError."""

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._setting: Overrides = {}
        self._levels: list[str] = []
        self._resource: dict[str, str] = {}
        self._batches = dict(_BATCH_DEFAULTS)
        self._reported = {name: str(number) for name, number in _BATCH_DEFAULTS.items()}

    def add_general(self, name: str, text: str) -> bool:
        """Adds a setting of both modes; returns False if it is unknown."""
        if name == "mode" and text in MODES:
            self._fields["mode"] = text
        elif name == "level" and text in ("OFF", *LEVELS):
            self._levels.append(text)
        elif name in ("rate", "count"):
            self._setting[f"trace_{name}"] = _number(f"trace_{name}", text)
        else:
            return False
        return True

    def add_of_mode(self, mode: str, name: str, text: str) -> bool:
        """Adds a setting of one mode; returns False if it is unknown."""
        if mode == OPENTELEMETRY:
            return self._add_opentelemetry(name, text)
        if name == "file":
            self._fields["file"] = text
        elif name == "log-frequency":
            self._setting["log_frequency"] = _number("log_frequency", text)
        else:
            return False
        return True

    def _add_opentelemetry(self, name: str, text: str) -> bool:
        if name == "url":
            self._fields["url"] = text
        elif name == "resource":
            key, equals, attribute = text.partition("=")
            if not equals:
                raise ValueError(f"--trace-config resource must be <key>=<value>, not '{text}'")
            self._resource[key] = attribute
        elif name in _BATCH_DEFAULTS:
            self._batches[name] = _batch_size(name, text)
        else:
            return False
        self._reported[name] = _without_user(text) if name == "url" else text
        return True

    def config(self) -> TraceConfig:
        """Returns the configuration of all values."""
        if self._fields.get("mode") == OPENTELEMETRY and not is_installed("tracing"):
            raise ValueError(missing_extra("--trace-config mode=opentelemetry", "tracing"))
        if self._batches["bsp_max_export_batch_size"] > self._batches["bsp_max_queue_size"]:
            raise ValueError("--trace-config bsp_max_export_batch_size must not exceed bsp_max_queue_size")
        if "OFF" in self._levels and len(self._levels) > 1:
            raise ValueError("--trace-config level=OFF excludes other levels")
        if self._levels:
            self._setting["trace_level"] = [level for level in LEVELS if level in self._levels]
        names = [name for name in ("url", "resource", *_BATCH_DEFAULTS) if name in self._reported]
        return TraceConfig(
            initial=_with(TraceSetting(), self._setting),
            resource=self._resource,
            batches=self._batches,
            options=tuple((name, self._reported[name]) for name in names),
            **self._fields,
        )


class TraceSettings:
    """The global setting ("") and those of models, over the command line's."""

    def __init__(self, config: TraceConfig) -> None:
        self.config = config
        self._overrides: dict[str, Overrides] = {}

    def setting(self, model: str = "") -> TraceSetting:
        """Returns the effective setting of a model, or the global one ("")."""
        setting = _with(self.config.initial, self._overrides.get("", {}))
        return _with(setting, self._overrides.get(model, {})) if model else setting

    def models(self) -> list[str]:
        """Returns the models with a setting of their own."""
        return [model for model in self._overrides if model]

    def replace(self, model: str, overrides: Overrides) -> None:
        """Replaces the own values of a setting."""
        if overrides:
            self._overrides[model] = overrides
        else:
            self._overrides.pop(model, None)

    def to_dict(self, model: str, remaining: int) -> dict[str, str | list[str]]:
        """Returns a setting in Triton's form and order; `remaining` is how many more requests will be traced."""
        setting, config = self.setting(model), self.config
        document: dict[str, str | list[str]] = {
            "trace_level": list(setting.levels) or ["OFF"],
            "trace_rate": str(setting.rate),
            "trace_count": str(remaining),
        }
        if config.mode == TRITON:
            return document | {
                "log_frequency": str(setting.log_frequency),
                "trace_file": config.file,
                "trace_mode": TRITON,
            }
        return document | {"trace_mode": config.mode} | dict(config.options)


def merged(own: Overrides, changes: Changes) -> Overrides:
    """The own values of a setting after `changes`."""
    return {name: value for name, value in {**own, **changes}.items() if value is not None}


def changes_of_json(document: Any) -> Changes:
    """Returns the changes of a JSON body. Like Triton, it ignores a body that is not an object, and unknown names.

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
    """Like `changes_of_json` for gRPC, where each setting is a list of values; an empty list removes the own value."""
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
    """Returns overrides as they are stored in the bucket."""
    return json.dumps(overrides).encode()


def unpack_overrides(data: bytes) -> Overrides:
    """Returns overrides from the bucket. Raises ValueError if they are malformed."""
    overrides = json.loads(data)
    if not isinstance(overrides, dict) or not overrides.keys() <= set(_FIELDS):
        raise ValueError("malformed trace settings: unknown fields")
    for name, value in overrides.items():
        if name == "trace_level":
            if not isinstance(value, list) or [level for level in LEVELS if level in value] != value:
                raise ValueError("malformed trace settings: unknown levels")
        elif type(value) is not int or not _LARGEST[name][0] <= value <= _LARGEST[name][1]:
            raise ValueError(f"malformed trace settings: {name} is out of range")
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
    # `blank` is what Triton's gRPC frontend has in one of the texts and its HTTP frontend has not.
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
            f"--trace-config option format is '<mode>,<setting>=<value>' or '<setting>=<value>'. Got {_without_user(value)}"
        )
    return mode, name, text


def _without_user(text: str) -> str:
    """A text without the user and the password of a URL in it, for errors and for those who may read the settings."""
    return _USER.sub("", text)


def _batch_size(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text[:10]) < 2**31):
        raise ValueError(f"--trace-config {name} must be a positive number, not '{text}'")
    return int(text)


class TraceSampler:
    """Decides which requests are traced. Source of the semantics: Triton's `SampleTrace`.

    It samples every `rate`-th request, `count` times (-1: no limit); with rate 0 none by itself. A request whose
    caller traces it (`is_propagated`) is always traced. It counts towards the rate, but reduces the count only if it
    would have been sampled anyway.
    """

    __slots__ = ("_rate", "_seen", "remaining")

    def __init__(self, rate: int, count: int) -> None:
        self._rate = rate
        self._seen = 0
        self.remaining = count

    def sample(self, is_propagated: bool = False) -> bool:
        """Whether the next request is traced."""
        if self._rate and self.remaining:
            self._seen += 1
            if self._seen == self._rate:
                self._seen = 0
                if self.remaining > 0:
                    self.remaining -= 1
                return True
        return is_propagated

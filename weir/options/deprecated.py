"""Triton's deprecated options, translated to their replacements.

Source: Triton's `command_line_parser.cc`. An option and its replacement may both be given, and the replacement wins;
for the size of the response cache giving both is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from weir.options.option import Option, UsageError
from weir.options.values import Choice, Integer, Switch, Text, Value

_PANEL = "Deprecated"

_LEVEL = Choice(
    ("OFF", "TIMESTAMPS", "TENSORS"),
    "invalid value for trace level option: {text}",
    aliases={"false": "OFF"} | dict.fromkeys(("true", "on", "min", "max"), "TIMESTAMPS"),
)


class _Trace(NamedTuple):
    """A deprecated trace option: the `--trace-config` setting that replaces it, and its text in the warning."""

    setting: str
    replacement: str
    value: Value


_TRACE = {
    "trace_file": _Trace("triton,file", "triton,file=<filepath>", Text("FILE")),
    "trace_level": _Trace("level", "level=<OFF|TIMESTAMPS|TENSORS>", _LEVEL),
    "trace_rate": _Trace("rate", "rate=<rate value>", Integer()),
    "trace_count": _Trace("count", "count=<count value>", Integer()),
    "trace_log_frequency": _Trace("triton,log-frequency", "triton,log-frequency=<log frequency value>", Integer()),
}

DEPRECATED: tuple[Option, ...] = (
    Option(
        names=("--strict-model-config",),
        value=Switch(),
        bare="true",
        help="Deprecated: use --disable-auto-complete-config.",
        panel=_PANEL,
    ),
    Option(
        names=("--response-cache-byte-size",),
        value=Integer(1, metavar="BYTES"),
        help="Deprecated: use --cache-config=local,size=BYTES.",
        panel=_PANEL,
    ),
    *(
        Option(
            names=(f"--{key.replace('_', '-')}",),
            value=trace.value,
            repeatable=key == "trace_level",
            help=f"Deprecated: use --trace-config={trace.setting}=VALUE.",
            panel=_PANEL,
        )
        for key, trace in _TRACE.items()
    ),
)


def replaced(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replace deprecated options in `values` (by option key); return the new values and the warnings to log.

    Raises UsageError, in Triton's wording, where an option and its replacement can't both be given.
    """
    changed, warnings = dict(values), []
    strict = changed.pop("strict_model_config", None)
    if strict is not None:
        warnings.append(
            "'--strict-model-config' has been deprecated! Please use '--disable-auto-complete-config' instead."
        )
        if changed["disable_auto_complete_config"] and not strict:
            warnings.append(
                "Overriding deprecated '--strict-model-config' from False to True "
                "in favor of '--disable-auto-complete-config'!"
            )
        changed["disable_auto_complete_config"] = strict or changed["disable_auto_complete_config"]
    size_bytes = changed.pop("response_cache_byte_size", None)
    if size_bytes is not None:
        if changed.get("cache_config"):
            raise UsageError(
                "Incompatible flags --response-cache-byte-size and --cache-config both provided. "
                "Please provide one or the other."
            )
        changed["cache_config"] = (f"local,size={size_bytes}",)
        warnings.append(
            "'--response-cache-byte-size' has been deprecated! This will default to the 'local' cache implementation "
            "with the provided byte size for its config. Please use '--cache-config' instead. The equivalent "
            f"--cache-config CLI args would be: '--cache-config=local,size={size_bytes}'"
        )
    given: tuple[str, ...] = changed.get("trace_config", ())
    replacing = {setting.partition("=")[0] for setting in given}
    older: list[str] = []
    for key, trace in _TRACE.items():
        value = changed.pop(key, None)
        if value is None or value == ():
            continue
        option = f"--{key.replace('_', '-')}"
        warnings.append(
            f"'{option}' has been deprecated and will be removed in future releases. "
            f"Please use '--trace-config {trace.replacement} instead."
        )
        if trace.setting in replacing:
            name = trace.setting.rpartition(",")[2]
            warnings.append(f"Overriding deprecated '{option}' in favor of provided {name} in --trace-config!")
        else:
            older += [f"{trace.setting}={one}" for one in (value if isinstance(value, tuple) else (value,))]
    if older:
        changed["trace_config"] = (*older, *given)
    return changed, warnings

"""Options of Triton's that would change what the server does and can't be honoured: refused, but for what they are
by default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weir.options.forms import cache_setting, device_pair
from weir.options.option import Option
from weir.options.values import Checked, Integer, Switch, Text, Value

_PANEL = "Refused"

_NO_LIBRARIES = "backends are part of Weir, and shared libraries of Triton's can't be loaded"
_NO_CACHE = "there is no response cache yet"


def _never(value: Any) -> bool:
    return False


def _off(value: Any) -> bool:
    return value is False


_ROWS: tuple[tuple[str, Value, Callable[[Any], bool], str], ...] = (
    ("--allow-sagemaker", Switch(), _off, "SageMaker's endpoints are not served"),
    ("--allow-vertex-ai", Switch(), _off, "Vertex AI's endpoints are not served"),
    ("--model-namespacing", Switch(), _off, "models are told apart by their names alone yet"),
    ("--cache-config", Checked("CACHE,KEY=VALUE", cache_setting), _never, _NO_CACHE),
    ("--cache-directory", Text("FOLDER"), _never, "caches of Triton's are shared libraries, which can't be loaded"),
    ("--model-load-gpu-limit", Checked("DEVICE:FRACTION", device_pair), _never, "device memory is not limited yet"),
    ("--backend-directory", Text("FOLDER"), _never, _NO_LIBRARIES),
    ("--repoagent-directory", Text("FOLDER"), _never, "there are no repository agents"),
)
"""(name, value, which values are no harm, why the others are refused)."""

_REPEATABLE = ("--cache-config", "--model-load-gpu-limit")

REFUSED: tuple[Option, ...] = tuple(
    Option(
        names=(name,),
        value=value,
        repeatable=name in _REPEATABLE,
        bare="true" if isinstance(value, Switch) else None,
        help=f"{'Refused' if harmless is _never else 'Only false'}: {why}.",
        refused=why,
        harmless=harmless,
        panel=_PANEL,
    )
    for name, value, harmless, why in _ROWS
)

CACHE_SIZE = Option(
    names=("--response-cache-byte-size",),
    value=Integer(metavar="BYTES"),
    help=f"Deprecated for --cache-config=local,size=BYTES, which is refused: {_NO_CACHE}.",
    refused=_NO_CACHE,
    panel=_PANEL,
)
"""The deprecated twin of `--cache-config`."""

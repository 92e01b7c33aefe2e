"""Options of Triton's that would change what the server does and can't be honoured: refused, but for what they are
by default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weir.options.option import Option
from weir.options.values import Switch, Text, Value

_PANEL = "Refused"


def _never(value: Any) -> bool:
    return False


def _off(value: Any) -> bool:
    return value is False


_ROWS: tuple[tuple[str, Value, Callable[[Any], bool], str], ...] = (
    ("--allow-sagemaker", Switch(), _off, "SageMaker's endpoints are not served"),
    ("--allow-vertex-ai", Switch(), _off, "Vertex AI's endpoints are not served"),
    ("--cache-directory", Text("FOLDER"), _never, "caches of Triton's are shared libraries, which can't be loaded"),
    ("--repoagent-directory", Text("FOLDER"), _never, "there are no repository agents"),
)
"""(name, value, which values are no harm, why the others are refused)."""

REFUSED: tuple[Option, ...] = tuple(
    Option(
        names=(name,),
        value=value,
        bare="true" if isinstance(value, Switch) else None,
        help=f"{'Refused' if harmless is _never else 'Only false'}: {why}.",
        refused=why,
        harmless=harmless,
        panel=_PANEL,
    )
    for name, value, harmless, why in _ROWS
)

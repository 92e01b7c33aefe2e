"""The table of `reference/metrics.md`: each of Weir's own metric families that the gateway declares, with its help text.

Families are declared as a call, or a tuple, that begins with the name and the help text (`gateway/metrics/`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_METRICS = Path(__file__).parents[1] / "gateway" / "metrics"
_NAME = re.compile(r"^weir_[a-z0-9_*]+$")
_ROLES = ("gateway", "worker")


def families() -> dict[str, str]:
    """The help text of each family, by name."""
    return dict(sorted(found for path in _METRICS.glob("*.py") for found in _declared(ast.parse(path.read_text()))))


def _declared(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        parts = node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.Tuple) else []
        texts = [_text(part) for part in parts[:2]]
        if len(texts) == 2 and _NAME.match(texts[0]) and " " in texts[1]:
            yield from (
                (texts[0].replace("*", role), texts[1].replace("*", role))
                for role in _ROLES
                if "*" in texts[0] or role == _ROLES[0]
            )


def _text(node: ast.expr) -> str:
    """The text of a string, with `*` for what an f-string fills in; "" for anything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def table() -> str:
    """A Markdown table of the families."""
    rows = [f"| `{name}` | {text} |" for name, text in families().items()]
    return "| metric | meaning |\n| --- | --- |\n" + "\n".join(rows)

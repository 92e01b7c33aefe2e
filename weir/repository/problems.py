"""`ConfigProblem`: what is wrong with a configuration and in which field; and the position of each field in a
`config.pbtxt`.

The rules name fields and know no files; `weir.repository.config_text.located` adds file, line and column.

Protobuf's parser reports where it stopped but not in which field, and nothing about fields that parsed well and are
invalid. `field_positions` reads just enough of the text format to follow fields. It rejects nothing: broken text yields
the positions up to the break, and as far as possible after it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from weir.schemas.core.errors import ErrorCode, WeirError


class ConfigProblem(WeirError):
    """An INVALID_ARG error about the field at `field`, a path such as `input[0].dims` ("" for the whole)."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(ErrorCode.INVALID_ARG, message)
        self.field = field


_TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*) | (?P<text>"(?:\\.|[^"\\\n])*"? | '(?:\\.|[^'\\\n])*'?)
    | (?P<name>[A-Za-z_]\w*) | (?P<mark>[{}<>\[\]:]) | (?P<other>.)""",
    re.VERBOSE,
)


class FieldPosition(NamedTuple):
    """The field at `path` (such as `input[0].dims`) begins at `line` and `column`, both counted from 1."""

    path: str
    line: int
    column: int


class _Level:
    """An open message: its path, its protobuf descriptor (None when unknown), and how often each field has come."""

    def __init__(self, path: str, descriptor: Any) -> None:
        self.path = path
        self.descriptor = descriptor
        self.seen: Counter[str] = Counter()

    def enter(self, name: str) -> tuple[str, Any]:
        """(path, descriptor) of the next value of the field `name`."""
        field: Any = self.descriptor.fields_by_name.get(name) if self.descriptor is not None else None
        message = field.message_type if field is not None else None
        path = f"{self.path}.{name}" if self.path else name
        if message is not None and field.is_repeated and not message.GetOptions().map_entry:
            path = f"{path}[{self.seen[name]}]"
        self.seen[name] += 1
        return path, message


def field_positions(text: str, descriptor: Any) -> Iterator[FieldPosition]:
    """The fields of `text`, in order, read as a message of the protobuf `descriptor`."""
    levels = [_Level("", descriptor)]
    name, in_list, is_value = "", False, False
    line, line_start = 1, 0
    for token in _TOKEN.finditer(text):
        word = token.group()
        if token.lastgroup == "skip":
            newlines = word.count("\n")
            if newlines:
                line, line_start = line + newlines, token.start() + word.rindex("\n") + 1
            continue
        if token.lastgroup == "name" and not is_value and not in_list:
            name = word
            path = f"{levels[-1].path}.{name}" if levels[-1].path else name
            yield FieldPosition(path, line, token.start() - line_start + 1)
        elif word in "{<":
            level = _Level(*levels[-1].enter(name))
            levels.append(level)
            yield FieldPosition(level.path, line, token.start() - line_start + 1)
            in_list = False
        elif word in "}>" and len(levels) > 1:
            path = levels.pop().path
            name = path.rpartition(".")[2].partition("[")[0]
        elif word == "[":
            in_list = True
        elif word == "]":
            in_list = False
        is_value = word == ":"


def position_of(path: str, text: str, descriptor: Any) -> FieldPosition | None:
    """Where the field at `path` stands in `text`, or else the nearest message around it; None when neither does."""
    first: dict[str, FieldPosition] = {}
    for position in field_positions(text, descriptor):
        first.setdefault(position.path, position)
    while path:
        if path in first:
            return first[path]
        path = path[:-1].rpartition("[")[0] if path.endswith("]") else path.rpartition(".")[0]
    return None

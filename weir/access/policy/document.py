"""`parse_policy` reads an `AccessPolicy` from YAML, and names the line and the column of what is wrong.

```yaml
roles:
  anonymous:            # whoever shows nothing
    rules:
      - actions: [health]
  caller:
    rules:
      - model: "resnet*"
        versions: [1, 2]
        actions: [infer, metadata, statistics]
  operator:
    rules:
      - actions: ["*"]
tokens:
  - issuer: https://login.example.org
    audience: weir
    keys: https://login.example.org/keys.json
certificates:
  - subject: CN=camera-7,O=Acme
    principal: camera-7
    roles: [caller]
broker_users:
  - user: camera-8
    roles: [caller]
```
"""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import ValidationError

from weir.access.policy.rules import AccessPolicy

MAX_POLICY_BYTES = 1 << 20
"""The size of a policy that is read."""

MAX_DEPTH = 32
"""Levels of a document, of which a policy has five."""


class PolicyError(ValueError):
    """A policy that can't be used, with the line and column of what is wrong with it."""


def parse_policy(text: str) -> AccessPolicy:
    """The policy that a YAML document states. Raises PolicyError, whose text begins with the line and column."""
    if len(text) > MAX_POLICY_BYTES:
        raise PolicyError(f"the policy has {len(text)} characters, and may have {MAX_POLICY_BYTES}")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        content = None if root is None else _content(root, 0, set())
    except yaml.MarkedYAMLError as error:
        raise PolicyError(f"{_at(error.problem_mark)}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise PolicyError(f"the policy is no YAML: {error}") from None
    try:
        return AccessPolicy.model_validate(content if content is not None else {})
    except ValidationError as error:
        first = error.errors()[0]
        place = _place(root, first["loc"])
        words = first["msg"].removeprefix("Value error, ")
        path = ".".join(map(str, first["loc"]))
        raise PolicyError(f"{_at(place)}: {path}: {words}" if path else f"{_at(place)}: {words}") from None


def _content(node: yaml.Node, depth: int, seen: set[int]) -> Any:
    """What a node says. A key that stands twice, an alias and a document of many levels are errors."""
    if id(node) in seen:  # a few lines of them could stand for any number of values
        raise yaml.MarkedYAMLError(problem="an alias, which a policy can't have", problem_mark=node.start_mark)
    seen.add(id(node))
    if depth > MAX_DEPTH:
        raise yaml.MarkedYAMLError(problem=f"more than {MAX_DEPTH} levels", problem_mark=node.start_mark)
    if isinstance(node, yaml.SequenceNode):
        return [_content(each, depth + 1, seen) for each in node.value]
    if isinstance(node, yaml.MappingNode):
        content: dict[Any, Any] = {}
        for key, value in node.value:
            name = _content(key, depth + 1, seen)
            if not isinstance(name, str):
                raise yaml.MarkedYAMLError(problem=f"{name!r} is no name", problem_mark=key.start_mark)
            if name in content:
                raise yaml.MarkedYAMLError(problem=f"'{name}' stands twice", problem_mark=key.start_mark)
            content[name] = _content(value, depth + 1, seen)
        return content
    return yaml.SafeLoader("").construct_object(node)


def _place(node: yaml.Node | None, path: tuple[int | str, ...]) -> yaml.Mark | None:
    """Where in the text the value at `path` begins, or the last part of the path that is there."""
    if node is None:
        return None
    mark = node.start_mark
    for step in path:
        if isinstance(node, yaml.MappingNode):
            pairs = {key.value: (key, value) for key, value in node.value}
            if step not in pairs:
                break
            key, node = pairs[step]
            mark = key.start_mark
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            mark = node.start_mark
        else:
            break
    return mark


def _at(mark: yaml.Mark | None) -> str:
    return "line 1" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"

"""The rules of the house, held by reading the source: floors, sizes, names, and what must not be written anywhere."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

FLOORS = {
    "weir": 5,
    "gateway": 4,
    "scheduler": 4,
    "worker": 4,
    "calls": 3,
    "bus": 2,
    "repository": 2,
    "telemetry": 2,
    "runtime": 1,
    "schemas": 0,
}
"""A package imports those on lower floors, and itself: never upward, never sideways."""

OUTSIDE_OF_SCHEMAS = {"numpy", "msgpack", "pydantic", "orjson", "rapidjson"}
"""What floor 0 may import besides the standard library."""

STUB = "worker/python_stub/"
OUTSIDE_OF_STUB = {"numpy", "msgpack", "triton_python_backend_utils"}
"""The stub runs in the users' environment, so it is alone: these, the standard library, and its own `_weir_*`."""

MAX_LINES = 700
LONGER_FILES: dict[str, str] = {}
"""Files that may be longer, with the reason."""

VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
VAGUE_BUT_GIVEN = {
    "triton_python_backend_utils": "Triton's name, which users' models import",
    "test_pb_utils": "its tests, by the name that models give it",
}

UNSAFE_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
"""Loading what they read runs code of whoever wrote it."""

MACHINE_FOLDERS = {"home", "root", "work", "tmp", "usr", "opt", "mnt", "Users", "var"}


class Source(NamedTuple):
    """One Python file: its path relative to the checkout, its lines, and its syntax tree."""

    path: str
    lines: list[str]
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.path.partition("/")[0]


def source(path: str, text: str) -> Source:
    return Source(path, text.splitlines(), ast.parse(text))


def sources(*folders: str) -> list[Source]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [source(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]


HOUSE = sources(*FLOORS)
EVERYTHING = HOUSE + sources("tests", "examples", "benchmarks", "docs")

Rule = Callable[[Source], Iterator[str]]


def imports(of: Source) -> Iterator[tuple[int, str, int]]:
    """(line, module, level of a relative import) of each import, wherever it stands."""
    for node in ast.walk(of.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or "", node.level


def calls(of: Source) -> Iterator[tuple[ast.Call, str]]:
    """(call, dotted name of what is called) of each call whose callee has a name."""
    for node in ast.walk(of.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield node, ast.unparse(node.func)


def strings(of: Source) -> Iterator[tuple[int, str]]:
    for node in ast.walk(of.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def imports_against_the_floors(of: Source) -> Iterator[str]:
    for line, module, level in imports(of):
        package = module.partition(".")[0]
        if level:
            yield f"{of.path}:{line}: relative import"
        elif package in FLOORS and package != of.package and FLOORS[package] >= FLOORS[of.package]:
            yield f"{of.path}:{line}: {of.package} (floor {FLOORS[of.package]}) imports {package} ({FLOORS[package]})"


def foreign_imports_of_schemas(of: Source) -> Iterator[str]:
    if of.package == "schemas":
        allowed = sys.stdlib_module_names | OUTSIDE_OF_SCHEMAS | {"schemas"}
        yield from _imports_outside(of, allowed)


def foreign_imports_of_the_stub(of: Source) -> Iterator[str]:
    if of.path.startswith(STUB):
        own = {Path(other.path).stem for other in HOUSE if Path(other.path).stem.startswith("_weir_")}
        yield from _imports_outside(of, sys.stdlib_module_names | OUTSIDE_OF_STUB | own)


def _imports_outside(of: Source, allowed: frozenset[str]) -> Iterator[str]:
    for line, module, _ in imports(of):
        if module.partition(".")[0] not in allowed:
            yield f"{of.path}:{line}: imports {module}"


def too_many_lines(of: Source) -> Iterator[str]:
    if len(of.lines) > MAX_LINES and of.path not in LONGER_FILES:
        yield f"{of.path}: {len(of.lines)} lines"


def vague_names(of: Source) -> Iterator[str]:
    for name in (*Path(of.path).parent.parts, Path(of.path).stem):
        if VAGUE_NAMES & set(name.split("_")) and name not in VAGUE_BUT_GIVEN:
            yield f"{of.path}: {name}"


def unsafe_loading(of: Source) -> Iterator[str]:
    for line, module, _ in imports(of):
        if module.partition(".")[0] in UNSAFE_MODULES:
            yield f"{of.path}:{line}: imports {module}"
    for call, name in calls(of):
        if name in ("eval", "exec", "yaml.load", "yaml.unsafe_load"):
            yield f"{of.path}:{call.lineno}: calls {name}"
        for keyword in call.keywords:
            if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False":
                yield f"{of.path}:{call.lineno}: allow_pickle"


def unmarked_asserts(of: Source) -> Iterator[str]:
    """`python -O` drops them: none may guard anything, and one that only tells the type checker something says so."""
    for node in ast.walk(of.tree):
        if isinstance(node, ast.Assert) and "noqa: S101" not in of.lines[node.lineno - 1]:
            yield f"{of.path}:{node.lineno}: assert"


def listening_everywhere(of: Source) -> Iterator[str]:
    """No address but loopback by default. Comparing with one that the user gave is no default."""
    compared = [operand for node in ast.walk(of.tree) if isinstance(node, ast.Compare) for operand in node.comparators]
    for node in ast.walk(of.tree):
        if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::") and node not in compared:
            yield f"{of.path}:{node.lineno}: {node.value!r}"


def machine_paths(of: Source) -> Iterator[str]:
    for line, text in strings(of):
        parts = text.split("/")
        if len(parts) > 2 and not parts[0] and parts[1] in MACHINE_FOLDERS and parts[2]:
            yield f"{of.path}:{line}: {text!r}"


HOUSE_RULES: list[Rule] = [
    imports_against_the_floors,
    foreign_imports_of_schemas,
    foreign_imports_of_the_stub,
    unmarked_asserts,
    listening_everywhere,
]
RULES: list[Rule] = [too_many_lines, vague_names, unsafe_loading, machine_paths]


@pytest.mark.parametrize("rule", HOUSE_RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps(rule: Rule) -> None:
    assert [breach for one in HOUSE for breach in rule(one)] == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps(rule: Rule) -> None:
    assert [breach for one in EVERYTHING for breach in rule(one)] == []


def test_every_package_of_the_house_has_a_floor() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "examples", "benchmarks", "docs"}
    assert packages == FLOORS.keys()


def test_exceptions_are_still_needed() -> None:
    by_path = {one.path: one for one in EVERYTHING}
    assert [path for path in LONGER_FILES if len(by_path[path].lines) <= MAX_LINES] == []
    assert VAGUE_BUT_GIVEN.keys() <= {Path(path).stem for path in by_path}


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (imports_against_the_floors, "bus/a.py", "def f():\n    from gateway.doors import Doors"),
        (imports_against_the_floors, "bus/a.py", "import telemetry.logs"),
        (imports_against_the_floors, "worker/a.py", "from scheduler import service"),
        (imports_against_the_floors, "worker/a.py", "from . import service"),
        (foreign_imports_of_schemas, "schemas/a.py", "import nats"),
        (foreign_imports_of_the_stub, STUB + "a.py", "from schemas.tensors import Tensor"),
        (too_many_lines, "bus/a.py", "\n" * (MAX_LINES + 1)),
        (vague_names, "bus/tensor_utils.py", ""),
        (unsafe_loading, "bus/a.py", "import pickle"),
        (unsafe_loading, "bus/a.py", "numpy.load(file, allow_pickle=True)"),
        (unsafe_loading, "bus/a.py", "eval(text)"),
        (unmarked_asserts, "bus/a.py", "assert user.is_admin"),
        (listening_everywhere, "gateway/a.py", "listen('0.0.0.0')"),
        (machine_paths, "bus/a.py", f"open('{'/home'}/somebody/file')"),
    ],
)
def test_each_rule_finds_what_breaks_it(rule: Rule, path: str, text: str) -> None:
    assert list(rule(source(path, text)))

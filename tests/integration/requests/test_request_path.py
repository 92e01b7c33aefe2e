"""The functions of one request in docs/architecture.md are those that one passes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import pytest

from benchmarks.hops.__main__ import ROLES, called, measured
from tests.support.docs.pages import ROOT

MAX_MISSING = 4
"""A gateway calls four functions after the last byte, which a slow client reads later."""

BY_LOAD = ("weir.worker.execution.instance:", "weir.worker.execution.microbatch:", "weir.worker.execution.updates:")
"""Whether a batch runs in the event loop or in its thread depends on how fast the machine is."""


def listed() -> dict[str, list[str]]:
    """The functions on the page, by role."""
    section = (ROOT / "docs" / "architecture.md").read_text().partition("## The functions of one request")[2]
    block = re.sub(r"\n  ", " ", section.partition("```text\n")[2].partition("\n```")[0])
    found: dict[str, list[str]] = {}
    role = ""
    for line in block.splitlines():
        module, _, names = line.partition(": ")
        if names:
            found[role] += _whole(module, names.split(", "))
        else:
            role = line.partition(",")[0].lower()
            found[role] = []
    del found["in all"]
    return found


def _whole(module: str, names: list[str]) -> Iterator[str]:
    owner = ""
    for name in names:
        whole = owner + name if name.startswith(".") else name
        owner = whole.rpartition(".")[0]
        yield f"weir.{module}:{whole}"


def defined(module: str) -> set[str]:
    """The qualified names of the functions of a module."""
    found: set[str] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + child.name)
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text()), "")
    return found


def test_the_page_lists_functions_that_there_are() -> None:
    page = listed()
    assert set(page) == set(ROLES)
    for name in {name for names in page.values() for name in names if not name.endswith(">")}:
        module, _, function = name.partition(":")
        assert function in defined(module), "run the benchmark for the page again"


@pytest.mark.timeout(120)
def test_the_page_lists_what_a_request_passes() -> None:
    page, captures = listed(), measured()
    ever = called(captures, 0.01)
    for role in ROLES:
        gone = {name for name in page[role] if not name.startswith(BY_LOAD)} - _plain(ever[role])
        assert gone == set(), "run the benchmark for the page again"
    # What schedulers and workers do after the response, on a slow machine they do before its last byte is read.
    missing = _plain(called(captures, 1.0)["gateway"]).difference(page["gateway"])
    assert len(missing) <= MAX_MISSING, f"run the benchmark for the page again: {missing}"


def _plain(names: Iterable[str]) -> set[str]:
    return {name.replace(".<locals>", "") for name in names}

"""The functions of one request in docs/architecture.md are those that one passes."""

from __future__ import annotations

import re

import pytest

from benchmarks.hops.__main__ import ROLES, called, measured
from tests.support.docs.pages import ROOT

MAX_MISSING = 4
"""What follows a response, as its completion does, may come before the last byte is read, for every request of a run."""


def listed() -> dict[str, set[str]]:
    """The functions on the page, by role."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    found: dict[str, set[str]] = {}
    for role, block in re.findall(r"^\*\*(\w+)\*\*: .*?```text\n(.*?)```", text, re.MULTILINE | re.DOTALL):
        lines = re.sub(r"\n +", " ", block).strip().splitlines()
        pairs = (line.partition(": ") for line in lines)
        found[role.lower()] = {f"weir.{module}:{name}" for module, _, names in pairs for name in names.split(", ")}
    return found


@pytest.mark.timeout(120)
def test_the_page_lists_what_a_request_passes() -> None:
    page, captures = listed(), measured()
    assert set(page) == set(ROLES)
    ever, always = called(captures, 0.01), called(captures, 1.0)
    for role in ROLES:
        assert page[role] <= {name.replace(".<locals>", "") for name in ever[role]}, (
            "run the benchmark for the page again"
        )
        missing = {name.replace(".<locals>", "") for name in always[role]} - page[role]
        assert len(missing) <= MAX_MISSING, f"run the benchmark for the page again: {missing}"

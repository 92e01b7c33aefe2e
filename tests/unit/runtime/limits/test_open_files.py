"""The limit of open files is raised as far as the system permits."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from weir.runtime.limits.open_files import MAX_OPEN_FILES, raise_open_files

_CODE = """
import resource, sys
from weir.runtime.limits.open_files import raise_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 700))
print(raise_open_files(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_soft_limit_becomes_the_hard_one() -> None:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["700", "700", "700"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((1024, resource.RLIM_INFINITY), MAX_OPEN_FILES),
        ((1024, 1 << 30), MAX_OPEN_FILES),
        ((MAX_OPEN_FILES, 1 << 30), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_no_further_than_a_million(given: tuple[int, int], wanted: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: raised[-1] if raised else given)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    assert raise_open_files() == MAX_OPEN_FILES
    assert raised == ([] if wanted is None else [(wanted, given[1])])


def test_what_is_not_permitted_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int, limits: tuple[int, int]) -> None:
        raise ValueError

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_open_files() == 1024

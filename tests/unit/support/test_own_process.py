"""`tests.support.own_process`: modules that are imported later, and functions in a process of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.own_process import later, run_in_own_process


def note_process(folder: str, *more: str) -> None:
    assert not more, "too much"
    Path(folder, "pid").write_text(str(os.getpid()))


def test_a_module_is_imported_when_it_is_used() -> None:
    module = later("tabnanny")  # which nothing else imports
    assert "tabnanny" not in sys.modules
    assert issubclass(module.NannyNag, Exception)
    assert sys.modules.pop("tabnanny")
    with pytest.raises(pytest.skip.Exception, match="no_such_module is not installed"):
        later("no_such_module")


def test_a_function_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    run_in_own_process(note_process, str(tmp_path))
    assert int((tmp_path / "pid").read_text()) != os.getpid()
    with pytest.raises(AssertionError, match="too much"):
        run_in_own_process(note_process, str(tmp_path), "more")

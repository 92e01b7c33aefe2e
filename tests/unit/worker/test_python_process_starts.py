"""Starts of a Python model's process that come to nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from python_models import IDENTITY, Models, numbers, only

from schemas.errors import WeirError
from worker.backends import python_process
from worker.backends.python_child import PythonChild
from worker.backends.python_process import ProcessDied, PythonRequest


def test_a_process_that_dies_before_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stillborn(PythonChild):
        def __init__(self, *where: Any) -> None:
            super().__init__(*where)
            os.kill(self.pid, signal.SIGKILL)

    with Models(tmp_path).running(IDENTITY) as process:
        process.kill()
        with pytest.raises(ProcessDied):
            process.execute([PythonRequest()])
        with monkeypatch.context() as patch:
            patch.setattr(python_process, "PythonChild", Stillborn)
            with pytest.raises(WeirError, match="ended by SIGKILL while it was loading the model"):
                process.start(30)
        process.start(30)
        only(process.execute([PythonRequest("", inputs=[numbers(1)])]))

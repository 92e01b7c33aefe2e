"""Readiness probes of the processes of Python models."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from tests.support.models.python_scripts import Models, only, python_request


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


@pytest.mark.parametrize(
    "method,expected",
    [
        ("pass", True),
        ("def is_ready(self): return True", True),
        ("async def is_ready(self): return False", False),
        ("def is_ready(self): return 'yes'", False),
        ("def is_ready(self): 1 / 0", False),
    ],
)
def test_readiness(models: Models, method: str, expected: bool) -> None:
    source = f"class TritonPythonModel:\n    {method}\n    def execute(self, requests): pass\n"
    with models.running(source) as process:
        assert (asyncio.run(process.probe.ask()) if process.probe else True) is expected
        assert (process.probe is None) == (method == "pass")


def test_a_model_whose_is_ready_hangs_is_not_ready_and_keeps_running(models: Models) -> None:
    source = """
        import time
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            hangs = True

            def is_ready(self):
                while self.hangs:
                    time.sleep(0.01)
                return True

            def execute(self, requests):
                self.hangs = False
                return [pb_utils.InferenceResponse() for _ in requests]
    """
    with models.running(source) as process:
        assert process.probe is not None
        assert asyncio.run(process.probe.ask(0.2)) is False
        only(process.execute([python_request()]))
        assert asyncio.run(process.probe.ask()) is True


def test_a_late_reply_is_for_the_probes_that_arrived_meanwhile(models: Models) -> None:
    """Else a model that takes longer than it may would never be ready."""
    source = """
        import gc, time

        class TritonPythonModel:
            calls = 0

            def is_ready(self):
                self.calls += 1
                watch = next(known for known in gc.get_objects() if type(known).__name__ == "ParentWatch")
                while watch._probes.empty():
                    time.sleep(0.005)
                return self.calls == 1

            def execute(self, requests): pass
    """
    with models.running(source) as process:
        assert process.probe is not None
        assert asyncio.run(process.probe.ask(0.2)) is False
        assert asyncio.run(process.probe.ask()) is True


@pytest.mark.parametrize("method", ["def is_ready(self): return True", "async def is_ready(self): return True"])
@pytest.mark.parametrize("execute", ["def execute", "async def execute"])
def test_a_model_is_asked_while_it_executes(models: Models, method: str, execute: str, tmp_path: Path) -> None:
    running, go = tmp_path / "running", tmp_path / "go"
    os.mkfifo(running)
    os.mkfifo(go)
    source = f"""
        import time
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            {method}

            {execute}(self, requests):
                open({str(running)!r}, "w").close()
                open({str(go)!r}).read()
                return [pb_utils.InferenceResponse() for _ in requests]
    """
    with models.running(source) as process:
        executing = threading.Thread(target=process.execute, args=([python_request()],))
        executing.start()
        running.read_text()
        probe = process.probe
        assert probe is not None
        assert asyncio.run(probe.ask()) is True
        go.open("w").close()
        executing.join()
        process.kill()
        assert asyncio.run(probe.ask()) is False

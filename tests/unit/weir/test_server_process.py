"""The bond between a server and the program that started it, from the server's side."""

import os
import select
import subprocess
import sys

import pytest

from weir.errors import StartError
from weir.server_process import PARENT_PID, parent_fd


def test_a_server_of_the_command_line_has_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARENT_PID, raising=False)
    with parent_fd() as fd:
        assert fd is None


def test_the_descriptor_is_not_readable_while_the_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARENT_PID, str(os.getppid()))
    with parent_fd() as fd:
        assert select.select([fd], [], [], 0)[0] == []
        assert PARENT_PID not in os.environ


def test_a_program_that_has_exited_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as exited:
        exited.wait()
    monkeypatch.setenv(PARENT_PID, str(exited.pid))
    with pytest.raises(StartError, match="has exited"), parent_fd():
        pass


def test_a_process_that_is_not_the_parent_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARENT_PID, str(os.getpid()))
    with pytest.raises(StartError, match="has exited"), parent_fd():
        pass

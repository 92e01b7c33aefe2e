"""`PythonChild`: the process behind one Python model, as something to ask questions of.

It knows how the process starts, answers and ends, and nothing of tensors. Whatever becomes of the process, no zombie,
no open file and no process of the model's own making is left once `close` has returned.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from worker.backends.python_environment import OWN_ENVIRONMENT, PythonEnvironment
from worker.host_policy import HostPolicy
from worker.process_group import GroupTie
from worker.python_stub._weir_channel import Channel, Kind
from worker.python_stub._weir_memory import create_memory

_STUB = Path(__file__).parent.parent / "python_stub" / "stub.py"
_SHOTS = (signal.SIGKILL, signal.SIGTERM)
"""What a process does not do to itself."""

# The kernel's parent-death signal follows the thread that started the process, so one lasting thread starts them all.
_spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="python-model-spawner")


class ProcessDied(Exception):
    """The process of a Python model is gone; the batch it was given has no answer and may be redone elsewhere.

    `was_shot`: somebody else has killed it, the system perhaps: it need not be the model's fault.
    """

    def __init__(self, message: str, was_shot: bool = False) -> None:
        super().__init__(message)
        self.was_shot = was_shot


class QuestionFailed(Exception):
    """The process answered that it could not do what it was asked; the text is for the client."""


class PythonChild:
    """One child process and the files shared with it: three channels, a lifeline, inputs, outputs, responses, calls.

    The process starts with the object, by the host policy of the calling thread. `ask` and `close` belong to one
    thread; `kill` may be called by any. `inputs_fd` and `outputs_fd` are the memories of the two directions. On
    `response_channel` the process asks, and `responses_fd` is the memory of what it sends there; `call_end` is the end
    of the channel of its calls, and `calls_fd` the memory of their large tensors. On `lifeline` it is asked whether its
    model is ready, at any time. It runs in `environment`; `metrics_fd` is the memory of models' own metrics. Raises
    OSError when the process can't be started.
    """

    def __init__(
        self,
        model_dir: Path,
        version: int | None,
        model_filename: str,
        environment: PythonEnvironment = OWN_ENVIRONMENT,
        metrics_fd: int | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._reason = ""
        with ExitStack() as ours, ExitStack() as theirs:
            end, other_end = socket.socketpair()
            ours.callback(end.close)
            theirs.callback(other_end.close)
            self.lifeline, other_lifeline = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.callback(self.lifeline.close)
            theirs.callback(other_lifeline.close)
            self.inputs_fd = create_memory("weir-python-inputs")
            ours.callback(os.close, self.inputs_fd)
            self.outputs_fd = create_memory("weir-python-outputs")
            ours.callback(os.close, self.outputs_fd)
            response_end, other_response_end = socket.socketpair()
            ours.callback(response_end.close)
            theirs.callback(other_response_end.close)
            self.responses_fd = create_memory("weir-python-responses")
            ours.callback(os.close, self.responses_fd)
            self.call_end, other_call_end = socket.socketpair()
            ours.callback(self.call_end.close)
            theirs.callback(other_call_end.close)
            self.calls_fd = create_memory("weir-python-calls")
            ours.callback(os.close, self.calls_fd)
            tie = GroupTie()
            ours.callback(tie.close)
            fds = (
                other_end.fileno(),
                other_lifeline.fileno(),
                self.inputs_fd,
                self.outputs_fd,
                other_response_end.fileno(),
                self.responses_fd,
                other_call_end.fileno(),
                self.calls_fd,
                self.calls_fd if metrics_fd is None else metrics_fd,
                tie.fd,
            )
            where = (str(model_dir.resolve()), "" if version is None else str(version), model_filename)
            self._process = _spawner.submit(_spawn, fds, where, environment, HostPolicy.current()).result()
            tie.tie(self._process.pid)
            self._channel = Channel(end)
            self.response_channel = Channel(response_end)
            self._resources = ours.pop_all()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def ask(self, kind: Kind, *arguments: Any, timeout_s: float | None = None) -> Any:
        """The process's answer to one question.

        Raises QuestionFailed when it says so, ProcessDied when it is gone, TimeoutError when it is silent for
        `timeout_s` (after which it can only be closed: a late answer would be taken for the next one's).
        """
        try:
            if timeout_s is not None:
                self._channel.set_timeout(timeout_s)
            self._channel.send(kind, *arguments)
            answer, value = self._channel.receive()
            if timeout_s is not None:
                self._channel.set_timeout(None)
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            self.kill()
            ending, was_shot = self._ending()
            raise ProcessDied(f"the model's process {ending}", was_shot) from error
        except (ValueError, TypeError, MemoryError) as error:
            # Something else has been written into the channel, where nothing can be told from anything any more.
            self.kill(f"what it said makes no sense: {error}")
            raise ProcessDied(f"the model's process {self._ending()[0]}") from error
        if answer == Kind.FAILED:
            raise QuestionFailed(value)
        return value

    def kill(self, reason: str = "") -> None:
        """Kills the process and those it has started, at once; an `ask` under way raises ProcessDied, with `reason`."""
        with self._lock:
            self._reason = self._reason or reason
            # Until it is waited for, a dead process keeps its id, so this can't hit another one's group.
            if self._process.returncode is None:
                try:
                    os.killpg(self._process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass

    def close(self, timeout_s: float = 0.0) -> str:
        """Gives the process `timeout_s` to end by itself, then kills what is left of it, and releases everything.

        Returns how it ended.
        """
        if self._process.returncode is None and timeout_s > 0:
            self._wait_for_end(timeout_s)
        self.kill()
        ending, _ = self._ending()
        self._resources.close()
        return ending

    def _wait_for_end(self, timeout_s: float) -> None:
        pidfd = os.pidfd_open(self._process.pid)
        try:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            poller.poll(timeout_s * 1000)
        finally:
            os.close(pidfd)

    def _ending(self) -> tuple[str, bool]:
        """How the process ended, and whether somebody else has killed it."""
        # Until it is waited for, a dead process keeps its id. So this waits for its end without the lock that `kill`
        # needs, for a process may take long to die, and takes the id away under it.
        if self._process.returncode is None:
            with contextlib.suppress(ChildProcessError):  # another thread was faster
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            status = self._process.wait()
        if status >= 0:
            return f"ended with status {status}", False
        if self._reason:
            return f"was killed: {self._reason}", False
        return f"was ended by {signal.Signals(-status).name}", -status in _SHOTS


def _spawn(
    fds: tuple[int, ...], where: tuple[str, ...], environment: PythonEnvironment, policy: HostPolicy
) -> subprocess.Popen[bytes]:
    policy.bind()  # a process begins where the thread that starts it runs
    return subprocess.Popen(
        [environment.interpreter, str(_STUB), *map(str, fds), *where],
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        env=environment.variables(),
        start_new_session=True,
    )

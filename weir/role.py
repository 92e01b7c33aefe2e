"""One supervised role: how it is started, the ties that hold it to the supervisor, and what it has announced.

Ties: the ready pipe (see `telemetry.readiness`), the lifeline, and the kernel's parent-death signal. A role has its own
session, so that Ctrl-C reaches the supervisor alone and roles are stopped in order.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bus.parent_death import dies_with_parent
from telemetry.readiness import LIFELINE_FD, READY_FD
from weir.forked_role import ForkedRole

_PROGRAM_WORDS = 4
_LONGEST_LINE = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """How to run one role.

    `argv` is the command, `python -P -m weir` and words; where there is a `main`, that runs the words, in a fork of this
    process. `drain_rank` orders the stop: lower ranks end before higher ones are told to. `kept_facts`
    maps an announced fact to the option that repeats it at the next start, so that a port which was drawn is kept.
    """

    name: str
    argv: tuple[str, ...]
    drain_rank: int = 0
    kept_facts: Mapping[str, str] = field(default_factory=dict)
    main: Callable[[Sequence[str]], None] | None = None


class Role:
    """A role over all its lives.

    `process` is the running one, if any. `facts` are those last announced. This life is `ready` once it has said so;
    `error` is why it says it can't start.
    """

    def __init__(self, spec: RoleSpec, lifeline_fd: int) -> None:
        self.name = spec.name
        self.drain_rank = spec.drain_rank
        self.process: subprocess.Popen[bytes] | ForkedRole | None = None
        self.ready_fd: int | None = None
        self.facts: dict[str, Any] = {}
        self.ready = False
        self.error: str | None = None
        self._spec = spec
        self._lifeline_fd = lifeline_fd
        self._line = b""

    def start(self, environment: Mapping[str, str]) -> None:
        """Start a life. `ready_fd` then is the pipe to read with `read_announcement`. Raises OSError."""
        self.ready = False
        self.error = None
        self._line = b""
        self.ready_fd, child_fd = os.pipe()
        os.set_blocking(self.ready_fd, False)
        try:
            self.process = self._run(
                [*self._spec.argv, *self._repeated_facts()],
                {**environment, READY_FD: str(child_fd), LIFELINE_FD: str(self._lifeline_fd)},
                (child_fd, self._lifeline_fd),
            )
        except OSError:
            self.close_ready_pipe()
            raise
        finally:
            os.close(child_fd)

    def _run(
        self, argv: Sequence[str], environment: Mapping[str, str], kept_fds: tuple[int, int]
    ) -> subprocess.Popen[bytes] | ForkedRole:
        if self._spec.main is not None:
            return ForkedRole(self._spec.main, argv[_PROGRAM_WORDS:], environment, kept_fds, " ".join(argv))
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=kept_fds,
            start_new_session=True,
            preexec_fn=dies_with_parent(),
        )

    def read_announcement(self) -> bool:
        """Take what the ready pipe holds now; True once there is no more to come.

        Then the role is `ready` or has an `error`; or neither, when it ended or wrote something else instead.
        """
        assert self.ready_fd is not None  # noqa: S101
        chunk = b" "
        while chunk and b"\n" not in chunk and len(self._line) < _LONGEST_LINE:
            try:
                chunk = os.read(self.ready_fd, 65536)
            except BlockingIOError:
                return False
            self._line += chunk
        announced = _parsed(self._line)
        if announced.pop("ready", False):
            self.facts = announced
            self.ready = True
        elif "error" in announced:
            self.error = str(announced["error"])
        return True

    def close_ready_pipe(self) -> None:
        """Give the ready pipe back."""
        if self.ready_fd is not None:
            os.close(self.ready_fd)
            self.ready_fd = None

    def _repeated_facts(self) -> list[str]:
        kept = self._spec.kept_facts.items()
        return [word for fact, option in kept if fact in self.facts for word in (option, str(self.facts[fact]))]


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        announced = json.loads(line)
    except ValueError:
        return {}
    return announced if isinstance(announced, dict) else {}

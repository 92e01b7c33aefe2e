"""`Role`: one supervised role, how it is started, its connections to the supervisor, and what it has announced.

The connections are the ready pipe and the lifeline (`weir.runtime.readiness`) and the kernel's parent-death signal. A
role has its own session, so that Ctrl-C reaches only the supervisor and roles are stopped in order.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weir.runtime.child_processes import dies_with_parent
from weir.runtime.readiness import LIFELINE_FD, READY_FD
from weir.supervisor.forked_role import ForkedRole

_PROGRAM_ARGUMENTS = 4
_LONGEST_LINE = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """How to run one role.

    `argv` is the command: `python -P -m weir` and its arguments. With `main`, a fork of this process calls `main` with the
    arguments instead. `prepare` is called before the first start; it imports the code of a fork. `start_rank` orders the
    start: the roles of one rank start together. `drain_rank` orders the stop: lower ranks stop first. `kept_facts` maps an
    announced fact to the option that repeats it at a restart, so that a restarted role keeps its selected port. With
    `facts_of`, the facts are those of the role of that name, which has a lower start rank, so that both have the same port.
    `environment` is added to that of all roles. `processors` are the numbers of those that the role may use (empty: those
    of this process). A server that runs without an `is_optional` role goes on when that role can't start or dies too often.
    """

    name: str
    argv: tuple[str, ...]
    start_rank: int = 0
    drain_rank: int = 0
    kept_facts: Mapping[str, str] = field(default_factory=dict)
    main: Callable[[Sequence[str]], None] | None = None
    prepare: Callable[[], None] = lambda: None
    facts_of: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    processors: frozenset[int] = frozenset()
    is_optional: bool = False


class Role:
    """One role across restarts.

    `process` is the running process, if any. `facts` are the last announced ones. `ready` is true once the current process
    has announced readiness; `error` is its reason for failing to start. `facts_from` is the role that `spec.facts_of`
    names.
    """

    def __init__(self, spec: RoleSpec, lifeline_fd: int, facts_from: Role | None = None) -> None:
        self.name = spec.name
        self.start_rank = spec.start_rank
        self.drain_rank = spec.drain_rank
        self.is_optional = spec.is_optional
        self.process: subprocess.Popen[bytes] | ForkedRole | None = None
        self.ready_fd: int | None = None
        self.facts: dict[str, Any] = {}
        self.ready = False
        self.error: str | None = None
        self._spec = spec
        self._lifeline_fd = lifeline_fd
        self._facts_from = facts_from or self
        self._is_prepared = False
        self._line = b""

    def prepare(self) -> None:
        """Call `spec.prepare`, the first time that this is called."""
        if not self._is_prepared:
            self._spec.prepare()
            self._is_prepared = True

    def start(self, environment: Mapping[str, str]) -> None:
        """Start a process. `ready_fd` is then the pipe to read with `read_announcement`. Raises OSError."""
        self.ready = False
        self.error = None
        self._line = b""
        self.ready_fd, child_fd = os.pipe()
        os.set_blocking(self.ready_fd, False)
        try:
            self.process = self._run(
                [*self._spec.argv, *self._repeated_facts()],
                {**environment, **self._spec.environment, READY_FD: str(child_fd), LIFELINE_FD: str(self._lifeline_fd)},
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
        restrict = self._restrict
        if self._spec.main is not None:
            main = self._spec.main

            def run(arguments: Sequence[str]) -> None:
                restrict()
                main(arguments)

            return ForkedRole(run, argv[_PROGRAM_ARGUMENTS:], environment, kept_fds, " ".join(argv))
        die_with_parent = dies_with_parent()

        def prepare() -> None:
            die_with_parent()
            restrict()

        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=kept_fds,
            start_new_session=True,
            preexec_fn=prepare,
        )

    def _restrict(self) -> None:
        """Restrict the calling process, and what it starts, to the processors of the role."""
        if self._spec.processors:
            os.sched_setaffinity(0, self._spec.processors)

    def read_announcement(self) -> bool:
        """Read the available data of the ready pipe; returns True once the announcement is complete.

        The role is then `ready` or has an `error`; it has neither if it exited or wrote something else.
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
        """Close the ready pipe."""
        if self.ready_fd is not None:
            os.close(self.ready_fd)
            self.ready_fd = None

    def _repeated_facts(self) -> list[str]:
        kept, facts = self._spec.kept_facts.items(), self._facts_from.facts
        return [word for fact, option in kept if fact in facts for word in (option, str(facts[fact]))]


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        announced = json.loads(line)
    except ValueError:
        return {}
    return announced if isinstance(announced, dict) else {}

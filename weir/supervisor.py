"""The parent of `weir serve`: starts nats-server and the roles, restarts what dies, stops all in order.

Promises: a role is started once those before it are ready; a role that dies comes back with backoff, until it has died
too often; a stop lets each rank finish before the next is told to; no child outlives this process, even when it is
killed. It runs no event loop and none of the users' code, so that there is little in it that could die.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bus.embedded import SYNCED_SERVER_VARIABLE, EmbeddedNats, NatsStartError
from bus.restarts import RestartHistory, RestartPolicy
from weir import NATS_URL_VARIABLE
from weir.role import Role, RoleSpec
from weir.signals import SignalQueue
from weir.start_error import StartError

EXIT_STOPPED = 0
EXIT_FORCED = 1
EXIT_BUDGET = 3

Child = Role | EmbeddedNats

_NATS_STOP_S = 10.0
_KILL_WAIT_S = 5.0

logger = logging.getLogger("weir.supervisor")


class Supervisor:
    """Runs `nats`, if given, and `roles` (in start order) until told to stop, or until one of them dies too often.

    `environment` is added to this process's own for the roles. `on_ready` gets each role's announced facts by its name,
    once, when all are ready. `exit_timeout_s` is the time a stop may take; what still runs then is killed.
    `parent_fd`, where given, tells by becoming readable that there is nobody left to serve: that is a stop, too.
    """

    def __init__(
        self,
        roles: Sequence[RoleSpec],
        *,
        nats: EmbeddedNats | None = None,
        environment: Mapping[str, str] | None = None,
        on_ready: Callable[[dict[str, dict[str, Any]]], None] = lambda facts: None,
        exit_timeout_s: float = 30.0,
        policy: RestartPolicy | None = None,
        parent_fd: int | None = None,
    ) -> None:
        self._nats = nats
        self._environment = {**os.environ, **(environment or {})}
        self._on_ready = on_ready
        self._exit_timeout_s = exit_timeout_s
        self._parent_fd = parent_fd
        # Roles hold the read end, and only this process the write end: it reads as ended once this process is gone.
        self._lifeline_fd, self._lifeline_held_fd = os.pipe()
        self._roles = [Role(spec, self._lifeline_fd) for spec in roles]
        self._children: list[Child] = [*([nats] if nats else []), *self._roles]
        self._histories = {child.name: RestartHistory(policy or RestartPolicy()) for child in self._children}
        self._ready_since: dict[str, float] = {}
        self._once_ready: set[str] = set()
        self._restarts_due: dict[str, float] = {}
        self._signals = SignalQueue((signal.SIGTERM, signal.SIGINT))
        self._selector = selectors.DefaultSelector()
        self._exit_status: int | None = None
        self._at_once = False
        self._killed = False

    def run(self) -> int:
        """Run until the end; returns the exit status: 0 stopped, 1 stopped by force, 3 a child died too often.

        Raises StartError when a child says that it can't start, or ends by itself before it was ever ready. Nothing is
        left running in any case. To be called once, in the main thread.
        """
        with self._signals, self._selector:
            self._selector.register(self._signals, selectors.EVENT_READ, self._take_signals)
            if self._parent_fd is not None:
                self._selector.register(self._parent_fd, selectors.EVENT_READ, self._parent_has_ended)
            try:
                self._start_all()
                while self._exit_status is None:
                    self._turn()
                status = self._exit_status
            finally:
                self._stop_all()
        return EXIT_FORCED if self._killed and status == EXIT_STOPPED else status

    def _start_all(self) -> None:
        for child in self._children:
            self._start(child)
            while child.name not in self._ready_since and self._exit_status is None:
                self._turn()
            if self._exit_status is not None:
                return
        self._on_ready({role.name: role.facts for role in self._roles})

    def _turn(self, until: float = math.inf) -> None:
        """Wait for an event, for the next restart, or for `until`, whichever is first, and deal with it."""
        moment = min(until, *self._restarts_due.values(), math.inf)
        for key, _ in self._selector.select(None if moment == math.inf else max(0.0, moment - time.monotonic())):
            key.data()
        for child in self._children:
            if self._restarts_due.get(child.name, math.inf) <= time.monotonic():
                del self._restarts_due[child.name]
                self._start(child)

    def _start(self, child: Child) -> None:
        try:
            if isinstance(child, Role):
                child.start(self._environment)
            else:
                self._environment[NATS_URL_VARIABLE] = child.start(cancelled=self._stop_was_asked)
                self._environment[SYNCED_SERVER_VARIABLE] = child.synced_name
        except (NatsStartError, OSError) as error:
            self._has_ended(child, f"{child.name} can't be started: {error}", reason=str(error))
            return
        assert child.process is not None  # noqa: S101
        pidfd = os.pidfd_open(child.process.pid)
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._reap(child, pidfd))
        if isinstance(child, Role):
            assert child.ready_fd is not None  # noqa: S101
            self._selector.register(child.ready_fd, selectors.EVENT_READ, lambda: self._read_announcement(child))
        else:
            self._is_ready(child)

    def _read_announcement(self, role: Role) -> None:
        if role.ready_fd is not None and role.read_announcement():
            self._close_ready_pipe(role)
            if role.ready:
                self._is_ready(role)

    def _close_ready_pipe(self, role: Role) -> None:
        self._selector.unregister(role.ready_fd)  # type: ignore[arg-type]
        role.close_ready_pipe()

    def _is_ready(self, child: Child) -> None:
        assert child.process is not None  # noqa: S101
        self._ready_since[child.name] = time.monotonic()
        self._once_ready.add(child.name)
        logger.info("%s is ready (process %d)", child.name, child.process.pid)

    def _reap(self, child: Child, pidfd: int) -> None:
        assert child.process is not None  # noqa: S101
        pid, status = child.process.pid, child.process.wait()
        reason = f"{child.name} {_how_it_ended(status)} before it was ready" if status >= 0 else None
        if isinstance(child, Role):
            self._read_announcement(child)  # its last words
            if child.ready_fd is not None:
                self._close_ready_pipe(child)
            reason = child.error or reason
        child.process = None
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._has_ended(child, f"{child.name} (process {pid}) {_how_it_ended(status)}", reason)

    def _has_ended(self, child: Child, event: str, reason: str | None) -> None:
        """Restart `child` later, or give up. `reason` is why it could not start, where that is more than bad luck."""
        ready_since = self._ready_since.pop(child.name, None)
        if self._exit_status is not None:
            return
        if child.name not in self._once_ready and reason is not None:
            raise StartError(reason)
        delay = self._histories[child.name].died(time.monotonic(), ready_since)
        if delay is None:
            logger.error("%s; it died too often, so the server exits", event)
            self._end(EXIT_BUDGET)
        else:
            logger.warning("%s; restarting it in %g s", event, delay)
            self._restarts_due[child.name] = time.monotonic() + delay

    def _take_signals(self) -> None:
        for number in self._signals.take():
            if self._exit_status is None:
                logger.info("%s: stopping within %g s", number.name, self._exit_timeout_s)
                self._end(EXIT_STOPPED)
            else:
                logger.warning("%s again: stopping at once", number.name)
                self._at_once = True

    def _parent_has_ended(self) -> None:
        self._selector.unregister(self._parent_fd)  # type: ignore[arg-type]
        if self._exit_status is None:
            logger.info("the program that started this server has ended: stopping within %g s", self._exit_timeout_s)
            self._end(EXIT_STOPPED)

    def _stop_was_asked(self) -> bool:
        self._take_signals()
        return self._exit_status is not None

    def _end(self, status: int) -> None:
        self._exit_status = status
        self._restarts_due.clear()

    def _stop_all(self) -> None:
        if self._exit_status is None:
            self._end(EXIT_FORCED)
        deadline = time.monotonic() + self._exit_timeout_s
        for rank in sorted({role.drain_rank for role in self._roles}):
            self._stop([role for role in self._roles if role.drain_rank == rank], deadline)
        if self._nats is not None:
            self._stop([self._nats], time.monotonic() + _NATS_STOP_S)
            self._nats.stop()
        os.close(self._lifeline_held_fd)
        os.close(self._lifeline_fd)

    def _stop(self, children: Sequence[Child], deadline: float) -> None:
        """Tell `children` to end and wait for it; kill those that have not by `deadline`, or when there is no time."""
        for child in children:
            if child.process is not None:
                child.process.terminate()
        while any(child.process for child in children) and not self._at_once and time.monotonic() < deadline:
            self._turn(deadline)
        for child in children:
            if child.process is not None:
                logger.warning("%s (process %d) has not ended and is killed", child.name, child.process.pid)
                self._killed = True
                child.process.kill()
        # Bounded, for a process stuck inside a device driver can't even be killed.
        killed_by = time.monotonic() + _KILL_WAIT_S
        while any(child.process for child in children) and time.monotonic() < killed_by:
            self._turn(killed_by)


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")

"""The supervisor of `weir serve`: starts nats-server and the roles, restarts them when they die, stops them in order.

Roles are started rank by rank, each rank once the ranks before it are ready. A role that dies is restarted with a back-off
until its restart budget is spent. A stop drains the roles rank by rank. No child outlives the supervisor, even when it is
killed. The supervisor runs no event loop and no user code, so that little can make it fail. `SignalQueue` delivers signals
on a file descriptor that the supervisor's selector waits on.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

from weir import NATS_URL_VARIABLE
from weir.bus.nats.embedded_server import SYNCED_SERVER_VARIABLE, URL_FILE_VARIABLE, EmbeddedNats, NatsStartError
from weir.errors import StartError
from weir.runtime.child_processes import RestartHistory, RestartPolicy
from weir.supervisor.role import Role, RoleSpec

logger = logging.getLogger("weir.supervisor.supervisor")

EXIT_STOPPED = 0
EXIT_FORCED = 1
EXIT_BUDGET = 3

Child = Role | EmbeddedNats

_STORE_CHECK_S = 1.0
_STORE_ROOM_BYTES = 32 << 20
"""How much room nats-server must have to be restarted after an error of a write."""

_STORE_RESTART_S = 20.0
"""The shortest time between two such restarts."""

_NATS_STOP_S = 10.0
_KILL_WAIT_S = 5.0


class Supervisor:
    """Runs `nats`, if given, and `roles` until a stop signal or until one of them dies too often.

    `environment` is added to this process's environment for the roles. `on_ready` is called once, when all are ready, with
    the facts that each role announced, by role name. After `exit_timeout_s` a stop kills what still runs. `parent_fd`
    becomes readable when the program that started the server exits, which stops it too.
    """

    def __init__(  # noqa: PLR0913 - keyword arguments of the one instance
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
        # Roles hold the read end and only this process the write end: they read end-of-file when this process exits.
        self._lifeline_fd, self._lifeline_held_fd = os.pipe()
        self._roles: list[Role] = []
        for spec in roles:
            facts_from = next((role for role in self._roles if role.name == spec.facts_of), None)
            self._roles.append(Role(spec, self._lifeline_fd, facts_from))
        self._children: list[Child] = [*([nats] if nats else []), *self._roles]
        self._histories = {child.name: RestartHistory(policy or RestartPolicy()) for child in self._children}
        self._ready_since: dict[str, float] = {}
        self._once_ready: set[str] = set()
        self._given_up: set[str] = set()
        self._restarts_due: dict[str, float] = {}
        self._store_check_due_s = math.inf
        self._store_restarted_s = -math.inf
        self._store_error = ""
        self._is_renewing = False  # nats-server is ended to be started again
        self._signals = SignalQueue((signal.SIGTERM, signal.SIGINT))
        self._selector = selectors.DefaultSelector()
        self._exit_status: int | None = None
        self._kill_now = False
        self._killed = False

    def run(self) -> int:
        """Run until the end; returns the exit status: 0 stopped, 1 stopped by force, 3 a child died too often.

        Raises StartError if a child reports that it can't start, or exits before it was ever ready. No child is left
        running in any case. Call it once, in the main thread.
        """
        with self._signals, self._selector:
            self._selector.register(self._signals, selectors.EVENT_READ, self._handle_signals)
            if self._parent_fd is not None:
                self._selector.register(self._parent_fd, selectors.EVENT_READ, self._on_parent_exit)
            try:
                self._start_all()
                while self._exit_status is None:
                    self._turn()
                status = self._exit_status
            finally:
                self._stop_all()
        return EXIT_FORCED if self._killed and status == EXIT_STOPPED else status

    def _start_all(self) -> None:
        ranks = sorted({role.start_rank for role in self._roles})
        by_rank = [[role for role in self._roles if role.start_rank == rank] for rank in ranks]
        if self._nats is not None:
            self._start_nats(self._nats, by_rank[0][0].prepare if by_rank else None)
        for rank, later in zip(by_rank, [*by_rank[1:], []], strict=True):
            for role in rank:
                role.prepare()
                if self._is_stopping():
                    return
                self._start(role)
            for role in later:  # while the roles that were just started start
                role.prepare()
            while not all(map(self._is_settled, rank)) and self._exit_status is None:
                self._turn()
            if self._exit_status is not None:
                return
        self._on_ready({role.name: role.facts for role in self._roles})

    def _is_settled(self, role: Role) -> bool:
        return role.name in self._ready_since or role.name in self._given_up

    def _start_nats(self, nats: EmbeddedNats, prepare: Callable[[], None] | None) -> None:
        """Start `nats`, call `prepare` meanwhile, and wait until `nats` is ready."""
        try:
            nats.launch()
        except NatsStartError as error:
            raise StartError(str(error)) from error
        try:
            if prepare is not None:
                prepare()
        except BaseException:
            nats.stop()  # no event can end it: its process isn't watched yet
            raise
        self._start(nats)

    def _turn(self, until: float = math.inf) -> None:
        """Wait for an event, the next restart or `until`, whichever comes first, and handle it."""
        wake_s = min(until, self._store_check_due_s, *self._restarts_due.values())
        for key, _ in self._selector.select(None if wake_s == math.inf else max(0.0, wake_s - time.monotonic())):
            key.data()
        for child in self._children:
            if self._restarts_due.get(child.name, math.inf) <= time.monotonic():
                del self._restarts_due[child.name]
                self._start(child)
        if self._store_check_due_s <= time.monotonic():
            self._check_store()

    def _check_store(self) -> None:
        """Restarts nats-server after an error of a write, which it would keep, once its volume has room."""
        now_s = time.monotonic()
        nats = self._nats
        if nats is None or nats.process is None or self._exit_status is not None:
            self._store_check_due_s = math.inf
            return
        self._store_check_due_s = now_s + _STORE_CHECK_S
        error = nats.write_error()
        if not error:
            return
        if error != self._store_error:
            self._store_error = error
            logger.error("nats-server can't store messages: %s; it is restarted once its volume has room", error)
        room_bytes = nats.room_bytes
        if room_bytes >= _STORE_ROOM_BYTES and now_s >= self._store_restarted_s + _STORE_RESTART_S:
            logger.warning("the volume of nats-server has %d MiB free: restarting it", room_bytes >> 20)
            self._store_restarted_s = now_s
            self._store_error = ""
            self._is_renewing = True
            nats.process.terminate()
            self._store_check_due_s = math.inf  # until it has been started again

    def _start(self, child: Child) -> None:
        try:
            if isinstance(child, Role):
                child.start(self._environment)
            else:
                self._environment[NATS_URL_VARIABLE] = child.start(cancelled=self._is_stopping)
                self._environment[SYNCED_SERVER_VARIABLE] = child.synced_name
                self._environment[URL_FILE_VARIABLE] = str(child.url_file.absolute())
        except (NatsStartError, OSError) as error:
            self._on_exit(child, f"{child.name} can't be started: {error}", reason=str(error))
            return
        assert child.process is not None  # noqa: S101
        pidfd = os.pidfd_open(child.process.pid)
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._reap(child, pidfd))
        if isinstance(child, Role):
            assert child.ready_fd is not None  # noqa: S101
            self._selector.register(child.ready_fd, selectors.EVENT_READ, lambda: self._read_announcement(child))
        else:
            self._on_ready_child(child)
            self._store_check_due_s = time.monotonic() + _STORE_CHECK_S

    def _read_announcement(self, role: Role) -> None:
        if role.ready_fd is not None and role.read_announcement():
            self._close_ready_pipe(role)
            if role.ready:
                self._on_ready_child(role)

    def _close_ready_pipe(self, role: Role) -> None:
        self._selector.unregister(role.ready_fd)  # type: ignore[arg-type]
        role.close_ready_pipe()

    def _on_ready_child(self, child: Child) -> None:
        assert child.process is not None  # noqa: S101
        self._ready_since[child.name] = time.monotonic()
        self._once_ready.add(child.name)
        logger.info("%s is ready (process %d)", child.name, child.process.pid)

    def _reap(self, child: Child, pidfd: int) -> None:
        assert child.process is not None  # noqa: S101
        pid, status = child.process.pid, child.process.wait()
        reason = f"{child.name} {_describe_exit(status)} before it was ready" if status >= 0 else None
        if isinstance(child, Role):
            self._read_announcement(child)  # it may have announced an error before it exited
            if child.ready_fd is not None:
                self._close_ready_pipe(child)
            reason = child.error or reason
        child.process = None
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._on_exit(child, f"{child.name} (process {pid}) {_describe_exit(status)}", reason)

    def _on_exit(self, child: Child, event: str, reason: str | None) -> None:
        """Schedule a restart of `child`, or stop the server. `reason` is why it can't start; None for a crash."""
        ready_since = self._ready_since.pop(child.name, None)
        if self._exit_status is not None:
            return
        if child is self._nats and self._is_renewing:
            self._is_renewing = False
            self._restarts_due[child.name] = time.monotonic()
            return
        is_optional = isinstance(child, Role) and child.is_optional
        if child.name not in self._once_ready and reason is not None:
            if not is_optional:
                raise StartError(reason)
            logger.error("%s can't be started: %s; the server runs without it", child.name, reason)
            self._given_up.add(child.name)
            return
        delay = self._histories[child.name].died(time.monotonic(), ready_since)
        if delay is None and is_optional:
            logger.error("%s; its restart budget is spent, the server runs without it", event)
            self._given_up.add(child.name)
        elif delay is None:
            logger.error("%s; its restart budget is spent, the server exits", event)
            self._end(EXIT_BUDGET)
        else:
            logger.warning("%s; restarting it in %g s", event, delay)
            self._restarts_due[child.name] = time.monotonic() + delay

    def _handle_signals(self) -> None:
        for number in self._signals.take():
            if self._exit_status is None:
                logger.info("received %s: stopping within %g s", number.name, self._exit_timeout_s)
                logger.info("Waiting for in-flight requests to complete.")  # Triton's line, which scripts look for
                self._end(EXIT_STOPPED)
            else:
                logger.warning("received %s again: stopping at once", number.name)
                self._kill_now = True

    def _on_parent_exit(self) -> None:
        self._selector.unregister(self._parent_fd)  # type: ignore[arg-type]
        if self._exit_status is None:
            logger.info("the program that started this server has exited: stopping within %g s", self._exit_timeout_s)
            self._end(EXIT_STOPPED)

    def _is_stopping(self) -> bool:
        self._handle_signals()
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
        """Terminate `children` and wait; kill those still running at `deadline`, or at once after a second signal."""
        for child in children:
            if child.process is not None:
                child.process.terminate()
        while any(child.process for child in children) and not self._kill_now and time.monotonic() < deadline:
            self._turn(deadline)
        for child in children:
            if child.process is not None:
                logger.warning("%s (process %d) has not stopped in time and is killed", child.name, child.process.pid)
                self._killed = True
                child.process.kill()
        # Bounded, because a process stuck in a device driver can't be killed.
        killed_by = time.monotonic() + _KILL_WAIT_S
        while any(child.process for child in children) and time.monotonic() < killed_by:
            self._turn(killed_by)


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (", possibly by the out-of-memory killer" if name == "SIGKILL" else "")


class SignalQueue:
    """While entered, queues the given signals instead of handling them. Main thread only."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self._numbers = tuple(numbers)
        self._previous: dict[signal.Signals, Any] = {}
        self._read_fd = self._write_fd = self._previous_wakeup_fd = -1

    def __enter__(self) -> SignalQueue:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, _ignore) for number in self._numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def fileno(self) -> int:
        """A file descriptor that is readable while a signal is queued."""
        return self._read_fd

    def take(self) -> list[signal.Signals]:
        """The signals received since the last call."""
        try:
            numbers = os.read(self._read_fd, 4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers if number in self._numbers]


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python itself writes the signal's number to the wake-up descriptor."""

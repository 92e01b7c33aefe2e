"""`PythonKeeper`: sees to it that one instance of a Python model has a process to run in.

A process that dies is followed by another, at once and then with growing delays, for ever; one that hangs, or is far too
large, is killed; one that has grown beyond its limit goes once its successor is there. The instance's thread borrows the
process for each batch, so nothing is taken away under it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from bus.restarts import RestartHistory, RestartPolicy
from runtime.containment import report
from worker.backend import InstanceDown
from worker.backends.python_limits import HARD_FACTOR, ProcessLimits, Verdict
from worker.backends.python_process import LOAD_STARTS, PythonProcess, StartFailed
from worker.backends.python_watchdog import WATCHDOG
from worker.version_health import VersionHealth

logger = logging.getLogger("weir.worker")

POLICY = RestartPolicy(first_delay_s=0.1, longest_delay_s=10.0, healthy_s=2.0, is_first_at_once=True, budget=None)

PATIENCE_S = 1.0
"""How long a batch waits at an instance without a process before it goes back to the queue; there it waits on."""

SEQUENCE_PATIENCE_S = 30.0
"""The same where another instance could do nothing with it."""

RETIRING_PATIENCE_S = 300.0
"""How long a process that is being replaced may take for the streams it has begun."""

STOP_TIMEOUT_S = 30.0
"""How long a model's `finalize` may take; then its process is killed."""

_LOOK_S = 0.02

NewProcess = Callable[[Callable[[PythonProcess], None]], PythonProcess]
"""Makes a process that is not started yet; it calls the function when it has ended."""


class PythonKeeper:
    """See the module. `start`, `borrow`, `give_back` and `close` belong to the instance's thread.

    `name` is the instance's; `health` is told whether it can run, by its `key` if it has one. With `keeps_state` no other
    instance, and no other process, can go on with what this one has begun.
    """

    def __init__(
        self,
        new_process: NewProcess,
        name: str,
        limits: ProcessLimits,
        health: VersionHealth,
        keeps_state: bool = False,
        policy: RestartPolicy = POLICY,
        key: str = "",
    ) -> None:
        self._key = key or name
        self._new_process = new_process
        self._name = name
        self._limits = limits
        self._health = health
        self._keeps_state = keeps_state
        self._history = RestartHistory(policy)
        self._replacing = RestartHistory(policy)
        self._changed = threading.Condition()
        self._lease = threading.Lock()  # held while a batch runs
        self._current: PythonProcess | None = None
        self._successor: PythonProcess | None = None
        self._starting: PythonProcess | None = None
        self._retiring: set[PythonProcess] = set()
        self._ready_since_s = 0.0
        self._replace_after_s = 0.0
        self._is_starting = False
        self._is_closed = False
        self._threads: set[threading.Thread] = set()

    def start(self) -> None:
        """The first process. Raises WeirError when the model can't be loaded."""
        for attempt in range(1, LOAD_STARTS + 1):
            process = self._new_process(self._ended)
            try:
                process.start(self._limits.start_timeout_s)
                break
            except StartFailed as failure:
                if not failure.was_shot or attempt == LOAD_STARTS:
                    raise
                logger.warning("%s: %s; it is started again", self._name, failure.message)
        with self._changed:
            self._install(process)
        if not process.is_running:
            self._ended(process)  # before it was the current one, when nobody took notice
        if self._limits.look_every_s:
            WATCHDOG.watch(self)

    def borrow(self) -> PythonProcess:
        """The process, for one batch; `give_back` it then. Raises InstanceDown when there is none for the time being."""
        while True:
            process = self._available()
            self._lease.acquire()
            if process is self._current:
                return process
            self._lease.release()

    def give_back(self) -> None:
        """The batch has run; now the process may be replaced."""
        self._lease.release()
        if self._successor is not None:
            self._replace()

    def lost(self, process: PythonProcess, reason: str) -> None:
        """The process that was borrowed has died."""
        self._ended(process, reason)

    def close(self) -> None:
        """Ends the process after its model's `finalize`, and all others."""
        WATCHDOG.forget(self)
        with self._changed:
            self._is_closed = True
            processes = [process for process in (self._current, self._successor) if process is not None]
            self._current = self._successor = None
            self._changed.notify_all()
        for process in processes:
            process.stop(STOP_TIMEOUT_S)
        while True:
            with self._changed:
                threads, starting = list(self._threads), self._starting
            if not threads:
                break
            if starting is not None:
                starting.kill("it is needed no more")
            threads[0].join(0.1)
        self._health.gone(self._key)

    # What the watchdog does

    @property
    def look_every_s(self) -> float:
        """See Watched."""
        return self._limits.look_every_s

    def look(self, now_s: float) -> None:
        """See Watched."""
        with self._changed:
            processes = [*self._retiring, *(process for process in (self._current, self._successor) if process)]
        for process in processes:
            resident_bytes = process.resident_bytes() if self._limits.memory_limit_bytes else 0
            verdict = self._limits.verdict(process.silent_s(now_s), resident_bytes)
            if verdict is Verdict.HUNG:
                process.kill(f"nothing came of its model for {self._limits.execution_timeout_s * 1000:g} ms")
            elif verdict is Verdict.RUNAWAY:
                process.kill(
                    f"it held {resident_bytes} bytes, more than {HARD_FACTOR} times its limit of "
                    f"{self._limits.memory_limit_bytes}"
                )
            elif verdict is Verdict.LARGE and process is self._current:
                self._begin_replacement(process, resident_bytes, now_s)

    def _begin_replacement(self, process: PythonProcess, resident_bytes: int, now_s: float) -> None:
        # Its state would be gone, and nobody would know. It is killed when it is far too large.
        if self._keeps_state or now_s < self._replace_after_s:
            return
        with self._changed:
            if self._is_starting or self._successor is not None or process is not self._current or self._is_closed:
                return
            logger.warning("%s: its process holds %d bytes and is replaced", self._name, resident_bytes)
            # Where the limit is too small for any process, this must not go on without a pause.
            self._replace_after_s = now_s + (self._replacing.died(now_s, self._ready_since_s) or 0.0)
            self._is_starting = True
            self._begin(self._start_anew, 0.0)

    # From one process to the next

    def _available(self) -> PythonProcess:
        if (process := self._current) is not None:
            return process
        deadline_s = time.monotonic() + (SEQUENCE_PATIENCE_S if self._keeps_state else PATIENCE_S)
        with self._changed:
            while (process := self._current) is None:
                if self._is_closed or time.monotonic() >= deadline_s:
                    raise InstanceDown("its process has died and is not there again yet")
                # Not at once: where the other one can't take the batch either, it comes back here.
                self._changed.wait(_LOOK_S)
                if self._current is None and not self._keeps_state and self._health.has_other_up(self._key):
                    raise InstanceDown("its process has died; other instances are there")
        return process

    def _install(self, process: PythonProcess) -> None:
        self._current = process
        self._ready_since_s = time.monotonic()
        self._health.up(self._key, process.probe)
        self._changed.notify_all()

    def _ended(self, process: PythonProcess, reason: str = "the model's process has died") -> None:
        """A process has ended: in its own thread, or in that of who borrowed it."""
        with self._changed:
            if self._is_closed:
                return
            if process is self._successor:
                self._successor = None
                self._begin(self._dispose, process)
            if process is not self._current:
                return
            self._current = None
            self._begin(self._dispose, process)
            now_s = time.monotonic()
            delay_s = self._history.died(now_s, self._ready_since_s) or 0.0
            if self._successor is not None:
                successor, self._successor = self._successor, None
                self._install(successor)
                return
            self._health.down(self._key, reason)
            logger.warning("%s: %s; it is started again in %.1f s", self._name, reason, delay_s)
            if not self._is_starting:
                self._is_starting = True
                self._begin(self._start_anew, delay_s)

    def _start_anew(self, delay_s: float) -> None:
        """Starts processes until one is there; where it was to replace one that still runs, only once."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, delay_s)
                if self._is_closed:
                    return
                process = self._starting = self._new_process(self._ended)
            failure = None
            try:
                process.start(self._limits.start_timeout_s)
            except StartFailed as error:
                failure = error
            except (OSError, RuntimeError) as error:  # there is no room for a process, or a thread
                process.bury()
                failure = StartFailed(f"{type(error).__name__}: {error}")
            except Exception as error:  # noqa: BLE001 - reported; else the model would never have a process again
                report("worker.backends.python_keeper: starting the process of a model", error)
                process.bury()
                failure = StartFailed(f"{type(error).__name__}: {error}")
            with self._changed:
                self._starting = None
                if failure is None:
                    self._started(process)
                    break
                if self._is_closed:
                    return
                now_s = time.monotonic()
                is_replacement = self._current is not None
                history = self._replacing if is_replacement else self._history
                delay_s = history.died(now_s, None) or 0.0
                logger.warning("%s: its process could not be started: %s", self._name, failure.message)
                if is_replacement:
                    self._is_starting = False
                    self._replace_after_s = now_s + delay_s
                    return
                self._health.down(self._key, failure.message)
        self._replace()

    def _started(self, process: PythonProcess) -> None:
        self._is_starting = False
        if self._is_closed or not process.is_running:
            self._begin(self._dispose, process)
            if not self._is_closed and self._current is None:
                self._is_starting = True
                self._begin(self._start_anew, self._history.died(time.monotonic(), None) or 0.0)
        elif self._current is None:
            self._install(process)
        else:
            self._successor = process

    def _replace(self) -> None:
        """Puts the successor in the place of a process that runs no batch."""
        with self._changed:
            if self._successor is None or not self._lease.acquire(blocking=False):
                return
            try:
                old, successor = self._current, self._successor
                self._successor = None
                self._install(successor)
                if old is not None:
                    self._retiring.add(old)
                    self._begin(self._retire, old)
            finally:
                self._lease.release()

    def _retire(self, process: PythonProcess) -> None:
        """Ends a process that was replaced, once the streams it has begun are over."""
        deadline_s = time.monotonic() + RETIRING_PATIENCE_S
        while process.is_running and process.has_open_requests and time.monotonic() < deadline_s:
            time.sleep(0.05)
        process.stop(STOP_TIMEOUT_S)
        with self._changed:
            self._retiring.discard(process)

    def _dispose(self, process: PythonProcess) -> None:
        """Gives up all that is held of a process that has died."""
        process.kill()
        with self._lease:  # who borrowed it notices first
            ending = process.bury()
        if ending:
            logger.info("%s: its process %s", self._name, ending)

    def _begin(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=self._run, args=(work, *arguments), name=f"{self._name} keeper", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _run(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        finally:
            self._threads.discard(threading.current_thread())

"""`ProcessSupervisor`: keeps a process running for one instance of a Python model, within the limits of its configuration.

A process that dies is replaced at once, and later deaths in a row with growing delays, without an end. A process that hangs
or is far too large is killed. One that has grown beyond its memory limit ends once its successor is ready. The instance's
thread acquires the process for each batch, so that no process is replaced under a batch that it runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from weir.runtime.child_processes import RestartHistory, RestartPolicy
from weir.runtime.containment import report
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError, invalid
from weir.worker.backend_api.interface import InstanceUnavailable
from weir.worker.backend_api.version_health import VersionHealth
from weir.worker.backends.python.process import PythonProcess, load_with_retries

logger = logging.getLogger("weir.worker")

EXECUTION_TIMEOUT = "execution-timeout-ms"
MEMORY_LIMIT = "memory-limit-bytes"
STUB_TIMEOUT = "stub-timeout-seconds"
"""Settings of the backend (`--backend-config=python,<name>=<value>`). The first two are also parameters of models."""

START_TIMEOUT_S = 120.0
"""How long a process may take to load its model where `stub-timeout-seconds` is not set."""

HARD_FACTOR = 2
"""A process is killed, whatever it is doing, once it holds this many times its memory limit."""

RESTART_POLICY = RestartPolicy(
    first_delay_s=0.1, longest_delay_s=10.0, healthy_s=2.0, is_first_at_once=True, budget=None
)

UNAVAILABLE_TIMEOUT_S = 1.0
"""How long a batch waits at an instance without a process before it goes back to its queue and waits there."""

SEQUENCE_UNAVAILABLE_TIMEOUT_S = 30.0
"""The same for instances that keep the state of sequences, whose batches no other instance can run."""

RETIRE_TIMEOUT_S = 300.0
"""How long a replaced process may take to finish the streams it has started."""

STOP_TIMEOUT_S = 30.0
"""How long a model's `finalize` may take before its process is killed."""

_POLL_S = 0.02


class LimitAction(Enum):
    """What happens to a process after its limits were checked."""

    NONE = "it is within its limits"
    KILL_HUNG = "it is killed: it shows no progress"
    REPLACE = "it is replaced between two batches: it is larger than its limit"
    KILL_OVERSIZED = "it is killed: it is far larger than its limit"


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """How long, and how large, the process of a Python model may be; 0 stands for no limit.

    `execution_timeout_s` bounds one `execute`; for a decoupled model it bounds the time between two signs of progress
    while requests are open. `memory_limit_bytes` bounds resident memory.
    """

    execution_timeout_s: float = 0.0
    memory_limit_bytes: int = 0
    start_timeout_s: float = START_TIMEOUT_S

    @classmethod
    def of(cls, config: ModelConfig, settings: Mapping[str, str]) -> ProcessLimits:
        """The limits of a model: its own parameters take precedence over the settings of the backend.

        Raises WeirError (INVALID_ARG) for a value that is not a whole number.
        """

        def configured(name: str) -> int:
            parameter = "weir_" + name.replace("-", "_")
            text = config.parameter(parameter)
            if text:
                return _whole_number(text, f"parameter {parameter} of model '{config.name}'")
            return _whole_number(settings.get(name, ""), name)

        return cls(
            configured(EXECUTION_TIMEOUT) / 1000,
            configured(MEMORY_LIMIT),
            _whole_number(settings.get(STUB_TIMEOUT, ""), STUB_TIMEOUT) or START_TIMEOUT_S,
        )

    @property
    def check_interval_s(self) -> float:
        """How often a process must be checked; 0 where it has no limits."""
        timeout_s = self.execution_timeout_s / 10 if self.execution_timeout_s else 0.25
        if not self.execution_timeout_s and not self.memory_limit_bytes:
            return 0.0
        return min(max(timeout_s, 0.01), 0.1 if self.memory_limit_bytes else 0.25)

    def action(self, silent_s: float | None, resident_bytes: int) -> LimitAction:
        """What to do with a process of this size that has shown no progress for `silent_s` (None: it is idle)."""
        if self.execution_timeout_s and silent_s is not None and silent_s > self.execution_timeout_s:
            return LimitAction.KILL_HUNG
        if self.memory_limit_bytes and resident_bytes > HARD_FACTOR * self.memory_limit_bytes:
            return LimitAction.KILL_OVERSIZED
        if self.memory_limit_bytes and resident_bytes > self.memory_limit_bytes:
            return LimitAction.REPLACE
        return LimitAction.NONE


def _whole_number(text: str, name: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise invalid(f"{name} must be a whole number, 0 for none, not '{text}'")
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedInstance:
    """The instance that a supervisor keeps running.

    `name` is for logs, and `key` identifies it among all instances of the worker (by default its name). With `keeps_state`,
    no other instance and no other process can continue the sequences that this one has started.
    """

    name: str
    key: str = ""
    limits: ProcessLimits = field(default_factory=ProcessLimits)
    keeps_state: bool = False
    restart_policy: RestartPolicy = RESTART_POLICY


NewProcess = Callable[[Callable[[PythonProcess], None]], PythonProcess]
"""Starts a process without loading its model; the process calls the function when it has ended. Raises OSError."""


class ProcessSupervisor:
    """Starts, checks, replaces and ends the processes of one instance, as this module describes.

    `start`, `acquire`, `release` and `close` belong to the instance's thread. `health` is updated whenever the instance
    can run or can't.
    """

    def __init__(self, new_process: NewProcess, instance: SupervisedInstance, health: VersionHealth) -> None:
        self._key = instance.key or instance.name
        self._new_process = new_process
        self._name = instance.name
        self._limits = instance.limits
        self._health = health
        self._keeps_state = instance.keeps_state
        self._restarts = RestartHistory(instance.restart_policy)
        self._replacements = RestartHistory(instance.restart_policy)
        self._changed = threading.Condition()
        self._lease = threading.Lock()  # held while a batch runs
        self._current: PythonProcess | None = None
        self._successor: PythonProcess | None = None
        self._starting: PythonProcess | None = None
        self._retiring: set[PythonProcess] = set()
        self._ready_since_s = 0.0
        self._next_replacement_s = 0.0
        self._is_starting = False
        self._is_closed = False
        self._threads: set[threading.Thread] = set()

    @property
    def check_interval_s(self) -> float:
        """How often the watchdog calls `check`."""
        return self._limits.check_interval_s

    def start(self) -> None:
        """Starts the first process. Raises WeirError when the model can't be loaded."""

        def load() -> PythonProcess:
            process = self._new_process(self.ended)
            process.load(self._limits.start_timeout_s)
            return process

        process = load_with_retries(load, self._name)
        with self._changed:
            self._install(process)
        if not process.is_running:
            self.ended(process)  # it ended before it was the current one, so that its own report was ignored
        if self.check_interval_s:
            WATCHDOG.watch(self)

    def acquire(self) -> PythonProcess:
        """The process, for one batch; call `release` afterwards. Raises InstanceUnavailable when there is none."""
        while True:
            process = self._available()
            self._lease.acquire()
            if process is self._current:
                return process
            self._lease.release()

    def release(self) -> None:
        """The batch has run: from now on the process may be replaced."""
        self._lease.release()
        if self._successor is not None:
            self._replace()

    def close(self) -> None:
        """Runs the model's `finalize`, and ends all processes of the instance."""
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
                starting.kill("the instance is being removed")
            threads[0].join(0.1)
        self._health.remove(self._key)

    def check(self, now_s: float) -> None:
        """Applies the limits to all processes of the instance. `now_s` is `time.monotonic()`."""
        with self._changed:
            processes = [*self._retiring, *(process for process in (self._current, self._successor) if process)]
        limits = self._limits
        for process in processes:
            resident_bytes = process.resident_bytes() if limits.memory_limit_bytes else 0
            action = limits.action(process.silent_s(now_s), resident_bytes)
            if action is LimitAction.KILL_HUNG:
                process.kill(f"its model showed no progress for {limits.execution_timeout_s * 1000:g} ms")
            elif action is LimitAction.KILL_OVERSIZED:
                process.kill(
                    f"it held {resident_bytes} bytes, more than {HARD_FACTOR} times its limit of "
                    f"{limits.memory_limit_bytes}"
                )
            elif action is LimitAction.REPLACE and process is self._current:
                self._start_replacement(process, resident_bytes, now_s)

    def _start_replacement(self, process: PythonProcess, resident_bytes: int, now_s: float) -> None:
        # A replacement would silently lose the state of sequences; such a process is only killed when it is far too large.
        if self._keeps_state or now_s < self._next_replacement_s:
            return
        with self._changed:
            if self._is_starting or self._successor is not None or process is not self._current or self._is_closed:
                return
            logger.warning("%s: its process holds %d bytes, replacing it", self._name, resident_bytes)
            # A limit that is too small for any process must not cause replacements without a pause.
            self._next_replacement_s = now_s + (self._replacements.died(now_s, self._ready_since_s) or 0.0)
            self._is_starting = True
            self._run_in_thread(self._restart, 0.0)

    def _available(self) -> PythonProcess:
        if (process := self._current) is not None:
            return process
        timeout_s = SEQUENCE_UNAVAILABLE_TIMEOUT_S if self._keeps_state else UNAVAILABLE_TIMEOUT_S
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while (process := self._current) is None:
                if self._is_closed or time.monotonic() >= deadline_s:
                    raise InstanceUnavailable("its process has died and is not running again yet")
                # Not at once: a batch that the other instance can't take either would come straight back.
                self._changed.wait(_POLL_S)
                if self._current is None and not self._keeps_state and self._health.has_other_up(self._key):
                    raise InstanceUnavailable("its process has died; other instances are available")
        return process

    def _install(self, process: PythonProcess) -> None:
        self._current = process
        self._ready_since_s = time.monotonic()
        self._health.up(self._key, process.probe)
        self._changed.notify_all()

    def ended(self, process: PythonProcess, reason: str = "the model's process has died") -> None:
        """Reports that a process has ended. Called in a thread of the process, or in that of the instance."""
        with self._changed:
            if self._is_closed:
                return
            if process is self._successor:
                self._successor = None
                self._run_in_thread(self._dispose, process)
            if process is not self._current:
                return
            self._current = None
            self._run_in_thread(self._dispose, process)
            now_s = time.monotonic()
            delay_s = self._restarts.died(now_s, self._ready_since_s) or 0.0
            if self._successor is not None:
                successor, self._successor = self._successor, None
                self._install(successor)
                return
            self._health.down(self._key, reason)
            logger.warning("%s: %s; starting another in %.1f s", self._name, reason, delay_s)
            if not self._is_starting:
                self._is_starting = True
                self._run_in_thread(self._restart, delay_s)

    def _restart(self, delay_s: float) -> None:
        """Starts processes until one is ready. A replacement for a running process is attempted once only."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, delay_s)
            if self._is_closed:
                return
            failure = self._start_one()
            with self._changed:
                if failure is None:
                    break
                if self._is_closed:
                    return
                now_s = time.monotonic()
                is_replacement = self._current is not None
                delay_s = (self._replacements if is_replacement else self._restarts).died(now_s, None) or 0.0
                logger.warning("%s: starting its process failed: %s", self._name, failure)
                if is_replacement:
                    self._is_starting = False
                    self._next_replacement_s = now_s + delay_s
                    return
                self._health.down(self._key, failure)
        self._replace()

    def _start_one(self) -> str | None:
        """Starts a process and puts it to use; the reason where that fails."""
        process = None
        try:
            process = self._new_process(self.ended)
            with self._changed:
                self._starting = process  # `close` kills it from now on
            process.load(self._limits.start_timeout_s)
            with self._changed:
                self._started(process)
            return None
        except WeirError as error:
            failure = error.message
        except (OSError, RuntimeError) as error:  # there are too many processes, threads or open files
            failure = f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - reported; the instance would otherwise never have a process again
            report("weir.worker.backends.python.supervisor: starting the process of a model", error)
            failure = f"{type(error).__name__}: {error}"
        finally:
            with self._changed:
                self._starting = None
        if process is not None:
            process.close()
        return failure

    def _started(self, process: PythonProcess) -> None:
        self._is_starting = False
        if self._is_closed or not process.is_running:
            self._run_in_thread(self._dispose, process)
            if not self._is_closed and self._current is None:
                self._is_starting = True
                self._run_in_thread(self._restart, self._restarts.died(time.monotonic(), None) or 0.0)
        elif self._current is None:
            self._install(process)
        else:
            self._successor = process

    def _replace(self) -> None:
        """Makes the successor the current process, unless a batch is running."""
        with self._changed:
            if self._successor is None or not self._lease.acquire(blocking=False):
                return
            try:
                old, successor = self._current, self._successor
                self._successor = None
                self._install(successor)
                if old is not None:
                    self._retiring.add(old)
                    self._run_in_thread(self._retire, old)
            finally:
                self._lease.release()

    def _retire(self, process: PythonProcess) -> None:
        """Ends a replaced process once the streams it has started are complete."""
        deadline_s = time.monotonic() + RETIRE_TIMEOUT_S
        while process.is_running and process.has_open_requests and time.monotonic() < deadline_s:
            time.sleep(0.05)
        process.stop(STOP_TIMEOUT_S)
        with self._changed:
            self._retiring.discard(process)

    def _dispose(self, process: PythonProcess) -> None:
        """Releases everything that is held for a process that has died."""
        process.kill()
        with self._lease:  # the instance's thread notices the death first
            ending = process.close()
        if ending:
            logger.info("%s: its process %s", self._name, ending)

    def _run_in_thread(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(
            target=self._run, args=(work, *arguments), name=f"{self._name} supervisor", daemon=True
        )
        self._threads.add(thread)
        thread.start()

    def _run(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        finally:
            self._threads.discard(threading.current_thread())


class Watchdog:
    """One thread that checks the processes of all Python models of a worker that have limits. For any thread.

    A limit thus costs a batch no more than noting when it began, and holds whatever the model's process does. The thread
    starts with the first call of `watch`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due_s: dict[ProcessSupervisor, float] = {}
        self._thread: threading.Thread | None = None

    def watch(self, supervisor: ProcessSupervisor) -> None:
        """Checks `supervisor` from now on."""
        with self._changed:
            self._due_s[supervisor] = time.monotonic() + supervisor.check_interval_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="python-watchdog", daemon=True)
                self._thread.start()
            self._changed.notify()

    def forget(self, supervisor: ProcessSupervisor) -> None:
        """Stops checking `supervisor`; a check that has started may still run."""
        with self._changed:
            self._due_s.pop(supervisor, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                now_s = time.monotonic()
                due = [supervisor for supervisor, due_s in self._due_s.items() if due_s <= now_s]
                for supervisor in due:
                    self._due_s[supervisor] = now_s + supervisor.check_interval_s
                if not due:
                    next_s = min(self._due_s.values(), default=None)
                    self._changed.wait(None if next_s is None else max(0.0, next_s - now_s))
            for supervisor in due:
                try:
                    supervisor.check(time.monotonic())
                except Exception:
                    logger.exception("checking the process of a Python model failed; the others are still checked")


WATCHDOG = Watchdog()
"""The watchdog of the worker."""

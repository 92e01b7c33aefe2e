"""`ProcessSupervisor` with real processes, and limits and delays chosen by the tests."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.models.processes import model_processes
from tests.support.models.python_scripts import (
    IDENTITY,
    Collected,
    ModelProcess,
    Models,
    execute_body,
    only,
    python_request,
)
from tests.support.waiting import wait_until
from weir.runtime.child_processes import RestartPolicy
from weir.schemas.config.model_config import ModelConfig, ModelParameter
from weir.schemas.core.errors import WeirError
from weir.worker.backend_api.interface import InstanceUnavailable
from weir.worker.backend_api.version_health import VersionHealth
from weir.worker.backends.python import supervisor
from weir.worker.backends.python.process import ProcessDied, ProcessSpec, PythonProcess
from weir.worker.backends.python.supervisor import LimitAction, ProcessLimits, ProcessSupervisor, SupervisedInstance

AT_ONCE = RestartPolicy(first_delay_s=0.0, longest_delay_s=0.0, is_first_at_once=True, budget=None)
DIED = "the model's process has died"

NEVER = RestartPolicy(first_delay_s=600.0, longest_delay_s=600.0, budget=None)


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


@pytest.fixture(autouse=True)
def generous_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a process may take long to start."""
    monkeypatch.setattr(supervisor, "UNAVAILABLE_TIMEOUT_S", 20.0)


class Supervised:
    """A supervisor of one model, and the processes that it has started."""

    def __init__(
        self,
        models: Models,
        source: str,
        limits: ProcessLimits | None = None,
        policy: RestartPolicy = AT_ONCE,
        keeps_state: bool = False,
        health: VersionHealth | None = None,
    ) -> None:
        folder = models.write(source)
        self.health = health or VersionHealth()
        self.started: list[PythonProcess] = []

        spec = ProcessSpec(folder, 1, arguments={"model_instance_name": "m_0_0", "model_config": "{}"})
        self.fail_spawn: Exception | None = None

        def new_process(on_end: Callable[[PythonProcess], None]) -> PythonProcess:
            if self.fail_spawn is not None:
                raise self.fail_spawn
            self.started.append(ModelProcess(spec, on_end))
            return self.started[-1]

        instance = SupervisedInstance(
            name="m_0_0", limits=limits or ProcessLimits(), keeps_state=keeps_state, restart_policy=policy
        )
        self.supervisor = ProcessSupervisor(new_process, instance, self.health)

    def run(self, id: str = "") -> int:
        """The process that ran a batch of one request."""
        process = self.supervisor.acquire()
        try:
            only(process.execute([python_request(id)], Collected()))
            return process.pid
        except ProcessDied as death:
            self.supervisor.ended(process, str(death))
            raise
        finally:
            self.supervisor.release()


@contextmanager
def supervised(*arguments: object, **options: object) -> Iterator[Supervised]:
    model = Supervised(*arguments, **options)  # type: ignore[arg-type]
    model.supervisor.start()
    try:
        yield model
    finally:
        model.supervisor.close()
    assert all(process.is_closed for process in model.started)


def test_a_process_that_dies_while_idle_is_replaced(models: Models) -> None:
    changes: list[str] = []
    health = VersionHealth(lambda: changes.append(health.problem))
    with supervised(models, IDENTITY, health=health) as made:
        pid = made.run()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(made.started) == 2 and not health.problem)
        assert made.run() != pid
    assert changes == [DIED, ""]


def test_a_start_that_raises_an_unexpected_error_is_repeated(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    with supervised(models, IDENTITY) as made:
        pid = made.run()
        failures = iter([ValueError("injected"), KeyError("injected")])
        load = PythonProcess.load

        def fail_first(process: PythonProcess, timeout_s: float) -> None:
            for error in failures:
                raise error
            load(process, timeout_s)

        monkeypatch.setattr(PythonProcess, "load", fail_first)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(made.started) == 4 and not made.health.problem)
        assert made.run() != pid


def test_many_deaths_leave_no_files_threads_or_processes(models: Models) -> None:
    others = {process.pid for process in model_processes()}
    with supervised(models, IDENTITY) as made:
        pid = made.run()
        files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for deaths in range(1, 9):
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda starts=deaths + 1: len(made.started) == starts and not made.health.problem)
            pid = made.run()
        wait_until(lambda: len(os.listdir("/proc/self/fd")) == files and threading.active_count() <= threads)
        assert {process.pid for process in model_processes()} - others == {pid}


def test_a_batch_is_requeued_while_no_process_runs(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "UNAVAILABLE_TIMEOUT_S", 0.1)
    with supervised(models, IDENTITY, policy=NEVER) as made:
        os.kill(made.run(), signal.SIGKILL)
        wait_until(lambda: made.health.problem)
        with pytest.raises(InstanceUnavailable, match="not running again yet"):
            made.run()
        made.health.up("m_0_1")
        monkeypatch.setattr(supervisor, "UNAVAILABLE_TIMEOUT_S", 600.0)
        with pytest.raises(InstanceUnavailable, match="other instances are available"):
            made.run()


def test_a_process_that_is_killed_while_it_loads_is_started_again(models: Models, tmp_path: Path) -> None:
    source = f"""
        import os, signal
        with open({str(tmp_path / "starts")!r}, "a") as starts:
            starts.write(".")
        if os.path.getsize({str(tmp_path / "starts")!r}) < 3:
            os.kill(os.getpid(), signal.SIGKILL)
    """
    identity = "\n".join(" " * 8 + line for line in IDENTITY.splitlines())
    with supervised(models, source + identity) as made:
        made.run()
    assert (tmp_path / "starts").read_text() == "..."


@pytest.mark.parametrize(
    ("ending", "starts", "reason"),
    [("os.kill(os.getpid(), 9)", 3, "ended by SIGKILL while"), ("os._exit(4)", 1, "ended with status 4 while")],
)
def test_a_model_that_does_not_load_fails_with_the_reason(
    models: Models, ending: str, starts: int, reason: str
) -> None:
    made = Supervised(models, f"import os; {ending}")
    with pytest.raises(WeirError, match=reason):
        made.supervisor.start()
    assert len(made.started) == starts


def test_failed_restarts_are_repeated(models: Models, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    source = f"import os\nassert not os.path.exists({str(broken)!r}), 'broken'\n{IDENTITY}"
    with supervised(models, source) as made:
        pid = made.run()
        broken.touch()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(made.started) > 3)
        assert "broken" in made.health.problem or made.health.problem == DIED
        broken.unlink()
        wait_until(lambda: not made.health.problem)
        assert made.run() != pid


def test_a_process_that_hangs_is_killed_with_the_reason(models: Models) -> None:
    source = execute_body("""
        if requests[0].request_id() == "hang":
            time.sleep(60)
        return [pb_utils.InferenceResponse() for _ in requests]
    """)
    with supervised(models, source, ProcessLimits(execution_timeout_s=0.3)) as made:
        pid = made.run()
        with pytest.raises(ProcessDied, match="was killed: its model showed no progress for 300 ms"):
            made.run("hang")
        assert made.run() != pid


GROWING = execute_body("""
    if requests[0].request_id() == "grow":
        self.kept = np.ones(60 << 20, np.uint8)
    if requests[0].request_id() == "explode":
        self.kept = np.ones(300 << 20, np.uint8)
        time.sleep(60)
    return [pb_utils.InferenceResponse() for _ in requests]
""")

BOUNDED = ProcessLimits(memory_limit_bytes=80 << 20)


def test_a_process_beyond_its_memory_limit_is_replaced_when_its_successor_is_ready(models: Models) -> None:
    changes: list[str] = []
    health = VersionHealth(lambda: changes.append(health.problem))
    with supervised(models, GROWING, BOUNDED, health=health) as made:
        pid = made.run("grow")
        wait_until(lambda: made.run() != pid)
        wait_until(lambda: made.started[0].is_closed)
    assert changes == []


def test_a_process_that_keeps_state_is_killed_at_twice_its_limit_but_never_replaced(models: Models) -> None:
    with supervised(models, GROWING, BOUNDED, keeps_state=True) as made:
        pid = made.run("grow")
        made.supervisor.check(time.monotonic())
        assert made.run() == pid
        with pytest.raises(ProcessDied, match="more than 2 times its limit of 83886080"):
            made.run("explode")
        assert made.run() != pid
        assert len(made.started) == 2


def test_a_replacement_that_fails_to_start_leaves_the_process_running(models: Models, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    source = f"import os\nassert not os.path.exists({str(broken)!r}), 'broken'\n{GROWING}"
    with supervised(models, source, BOUNDED) as made:
        pid = made.run()
        broken.touch()
        made.run("grow")
        wait_until(lambda: len(made.started) >= 2)
        assert made.run() == pid
        broken.unlink()
        wait_until(lambda: made.run() != pid)


def test_a_limit_that_is_too_small_for_any_process_does_not_cause_a_restart_storm(models: Models) -> None:
    with models.running(IDENTITY) as process:
        tiny = ProcessLimits(memory_limit_bytes=process.resident_bytes() * 3 // 4)
    slow = RestartPolicy(first_delay_s=600.0, longest_delay_s=600.0)
    with supervised(models, IDENTITY, tiny, replace(slow, is_first_at_once=True, budget=None)) as made:
        pid = made.run()
        wait_until(lambda: made.run() != pid)
        assert made.run()
        assert len(made.started) == 2


def test_a_process_that_can_not_be_spawned_is_tried_again(models: Models) -> None:
    with supervised(models, IDENTITY) as made:
        pid = made.run()
        made.fail_spawn = BlockingIOError(11, "Resource temporarily unavailable")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: "temporarily unavailable" in made.health.problem)
        made.fail_spawn = None
        wait_until(lambda: not made.health.problem)
        assert made.run() != pid


def test_close_ends_a_start_in_progress(models: Models, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    source = f"import os, time\nif os.path.exists({str(slow)!r}): time.sleep(600)\n{IDENTITY}"
    with supervised(models, source) as made:
        slow.touch()
        os.kill(made.run(), signal.SIGKILL)
        wait_until(lambda: len(made.started) == 2 and made.started[1].is_running)


def limits_config(**parameters: str) -> ModelConfig:
    return ModelConfig(
        name="m", parameters={f"weir_{name}": ModelParameter(string_value=text) for name, text in parameters.items()}
    )


def test_a_process_without_limits_is_never_checked() -> None:
    limits = ProcessLimits.of(limits_config(), {})
    assert limits == ProcessLimits()
    assert limits.check_interval_s == 0
    assert limits.action(1e9, 1 << 60) is LimitAction.NONE


def test_parameters_of_a_model_precede_settings_of_the_backend() -> None:
    settings = {"execution-timeout-ms": "1000", "memory-limit-bytes": "5", "stub-timeout-seconds": "7"}
    assert ProcessLimits.of(limits_config(), settings) == ProcessLimits(1.0, 5, 7.0)
    assert ProcessLimits.of(limits_config(execution_timeout_ms="0", memory_limit_bytes="9"), settings) == ProcessLimits(
        0, 9, 7
    )


@pytest.mark.parametrize("text", ["-1", "1.5", "ten", "9" * 19, "²"])
def test_limits_must_be_whole_numbers(text: str) -> None:
    with pytest.raises(WeirError, match="weir_execution_timeout_ms of model 'm' must be a whole number"):
        ProcessLimits.of(limits_config(execution_timeout_ms=text), {})
    with pytest.raises(WeirError, match="memory-limit-bytes must be a whole number"):
        ProcessLimits.of(limits_config(), {"memory-limit-bytes": text})


@pytest.mark.parametrize(
    ("silent_s", "resident", "action"),
    [
        (None, 10, LimitAction.NONE),
        (1.0, 100, LimitAction.NONE),
        (1.1, 1000, LimitAction.KILL_HUNG),
        (None, 101, LimitAction.REPLACE),
        (0.5, 200, LimitAction.REPLACE),
        (0.5, 201, LimitAction.KILL_OVERSIZED),
    ],
)
def test_actions(silent_s: float | None, resident: int, action: LimitAction) -> None:
    limits = ProcessLimits(execution_timeout_s=1.0, memory_limit_bytes=100)
    assert limits.action(silent_s, resident) is action

"""How an instance of a Python model comes by its processes: real ones, with limits and delays of the tests' own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from python_models import IDENTITY, Models, execute_body, only

from bus.restarts import RestartPolicy
from schemas.errors import WeirError
from worker.backend import InstanceDown
from worker.backends import python_keeper, python_process
from worker.backends.python_keeper import PythonKeeper
from worker.backends.python_limits import ProcessLimits
from worker.backends.python_process import ProcessDied, PythonProcess, PythonRequest
from worker.version_health import VersionHealth

AT_ONCE = RestartPolicy(first_delay_s=0.0, longest_delay_s=0.0, is_first_at_once=True, budget=None)
GONE = "the model's process has died"

NEVER = RestartPolicy(first_delay_s=600.0, longest_delay_s=600.0, budget=None)


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may take its time on a busy machine."""
    monkeypatch.setattr(python_keeper, "PATIENCE_S", 20.0)


class Kept:
    """A keeper of a model of one's own."""

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

        def new_process(on_end: Callable[[PythonProcess], None]) -> PythonProcess:
            args = {"model_instance_name": "m_0_0", "model_config": "{}"}
            self.started.append(PythonProcess(folder, 1, "model.py", args, on_end=on_end))
            return self.started[-1]

        self.keeper = PythonKeeper(new_process, "m_0_0", limits or ProcessLimits(), self.health, keeps_state, policy)

    def run(self, id: str = "") -> int:
        """The process that ran a batch of one request."""
        process = self.keeper.borrow()
        try:
            pid = process.pid
            assert pid is not None
            only(process.execute([PythonRequest(id)]))
            return pid
        except ProcessDied as death:
            self.keeper.lost(process, str(death))
            raise
        finally:
            self.keeper.give_back()


@contextmanager
def kept(*arguments: object, **options: object) -> Iterator[Kept]:
    made = Kept(*arguments, **options)  # type: ignore[arg-type]
    made.keeper.start()
    try:
        yield made
    finally:
        made.keeper.close()
    assert all(process.pid is None for process in made.started)


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.005)


def test_a_dead_one_is_followed_by_another_though_nobody_asks(models: Models) -> None:
    changes: list[str] = []
    health = VersionHealth(lambda: changes.append(health.problem))
    with kept(models, IDENTITY, health=health) as made:
        pid = made.run()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(made.started) == 2 and not health.problem)
        assert made.run() != pid
    assert changes == [GONE, ""]


def test_a_start_that_fails_in_an_unexpected_way_is_tried_again(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kept(models, IDENTITY) as made:
        pid = made.run()
        failures = iter([ValueError("injected"), KeyError("injected")])
        start = PythonProcess.start

        def fail_first(process: PythonProcess, timeout_s: float) -> None:
            for error in failures:
                raise error
            start(process, timeout_s)

        monkeypatch.setattr(PythonProcess, "start", fail_first)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(made.started) == 4 and not made.health.problem)
        assert made.run() != pid


def test_many_deaths_leave_nothing(models: Models) -> None:
    others = {child.pid for child in psutil.Process().children()}
    with kept(models, IDENTITY) as made:
        pid = made.run()
        files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for deaths in range(1, 9):
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda starts=deaths + 1: len(made.started) == starts and not made.health.problem)
            pid = made.run()
        wait_until(lambda: len(os.listdir("/proc/self/fd")) == files and threading.active_count() <= threads)
        assert {child.pid for child in psutil.Process().children()} - others == {pid}


def test_while_there_is_none_a_batch_is_sent_back(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_keeper, "PATIENCE_S", 0.1)
    with kept(models, IDENTITY, policy=NEVER) as made:
        os.kill(made.run(), signal.SIGKILL)
        wait_until(lambda: made.health.problem)
        with pytest.raises(InstanceDown, match="not there again yet"):
            made.run()
        made.health.up("m_0_1")
        monkeypatch.setattr(python_keeper, "PATIENCE_S", 600.0)
        with pytest.raises(InstanceDown, match="other instances are there"):
            made.run()


def test_one_that_is_killed_while_it_loads_is_tried_again(models: Models, tmp_path: Path) -> None:
    source = f"""
        import os, signal
        with open({str(tmp_path / "starts")!r}, "a") as starts:
            starts.write(".")
        if os.path.getsize({str(tmp_path / "starts")!r}) < 3:
            os.kill(os.getpid(), signal.SIGKILL)
    """
    identity = "\n".join(" " * 8 + line for line in IDENTITY.splitlines())
    with kept(models, source + identity) as made:
        made.run()
    assert (tmp_path / "starts").read_text() == "..."


@pytest.mark.parametrize(
    ("ending", "starts", "reason"),
    [("os.kill(os.getpid(), 9)", 3, "ended by SIGKILL while"), ("os._exit(4)", 1, "ended with status 4 while")],
)
def test_what_does_not_load_fails_with_the_reason(models: Models, ending: str, starts: int, reason: str) -> None:
    made = Kept(models, f"import os; {ending}")
    with pytest.raises(WeirError, match=reason):
        made.keeper.start()
    assert len(made.started) == starts


def test_restarts_that_fail_are_repeated(models: Models, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    source = f"import os\nassert not os.path.exists({str(broken)!r}), 'broken'\n{IDENTITY}"
    with kept(models, source) as made:
        pid = made.run()
        broken.touch()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(made.started) > 3)
        assert "broken" in made.health.problem or made.health.problem == GONE
        broken.unlink()
        wait_until(lambda: not made.health.problem)
        assert made.run() != pid


def test_one_that_hangs_is_killed_and_says_why(models: Models) -> None:
    source = execute_body("""
        if requests[0].request_id() == "hang":
            time.sleep(60)
        return [pb_utils.InferenceResponse() for _ in requests]
    """)
    with kept(models, source, ProcessLimits(execution_timeout_s=0.3)) as made:
        pid = made.run()
        with pytest.raises(ProcessDied, match="was killed: nothing came of its model for 300 ms"):
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


def test_one_that_has_grown_is_replaced_once_another_is_there(models: Models) -> None:
    changes: list[str] = []
    health = VersionHealth(lambda: changes.append(health.problem))
    with kept(models, GROWING, BOUNDED, health=health) as made:
        pid = made.run("grow")
        wait_until(lambda: made.run() != pid)
        wait_until(lambda: made.started[0].pid is None)
    assert changes == []


def test_one_that_keeps_state_is_not_replaced_but_killed_beyond_all_bounds(models: Models) -> None:
    with kept(models, GROWING, BOUNDED, keeps_state=True) as made:
        pid = made.run("grow")
        made.keeper.look(time.monotonic())
        assert made.run() == pid
        with pytest.raises(ProcessDied, match="more than 2 times its limit of 83886080"):
            made.run("explode")
        assert made.run() != pid
        assert len(made.started) == 2


def test_a_replacement_that_can_not_be_started_changes_nothing(models: Models, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    source = f"import os\nassert not os.path.exists({str(broken)!r}), 'broken'\n{GROWING}"
    with kept(models, source, BOUNDED) as made:
        pid = made.run()
        broken.touch()
        made.run("grow")
        wait_until(lambda: len(made.started) >= 2)
        assert made.run() == pid
        broken.unlink()
        wait_until(lambda: made.run() != pid)


def test_a_limit_that_is_too_small_for_any_process_does_not_make_a_storm(models: Models) -> None:
    tiny, slow = ProcessLimits(memory_limit_bytes=22 << 20), RestartPolicy(first_delay_s=600.0, longest_delay_s=600.0)
    with kept(models, IDENTITY, tiny, replace(slow, is_first_at_once=True, budget=None)) as made:
        pid = made.run()
        wait_until(lambda: made.run() != pid)
        assert made.run()
        assert len(made.started) == 2


def test_one_for_which_there_is_no_room_is_tried_again(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    with kept(models, IDENTITY) as made:
        pid = made.run()
        with monkeypatch.context() as patch:

            def no_room(*_: object) -> None:
                raise BlockingIOError(11, "Resource temporarily unavailable")

            patch.setattr(python_process, "PythonChild", no_room)
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: "temporarily unavailable" in made.health.problem)
        wait_until(lambda: not made.health.problem)
        assert made.run() != pid


def test_a_close_ends_a_start_that_is_under_way(models: Models, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    source = f"import os, time\nif os.path.exists({str(slow)!r}): time.sleep(60)\n{IDENTITY}"
    with kept(models, source) as made:
        slow.touch()
        os.kill(made.run(), signal.SIGKILL)
        wait_until(lambda: len(made.started) == 2 and made.started[1].pid is not None)
        began = time.monotonic()
    assert time.monotonic() - began < 10

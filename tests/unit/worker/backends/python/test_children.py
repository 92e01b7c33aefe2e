"""Processes of models: forked where that makes no difference, with their own files, variables, folder, ids and endings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.models.processes import fork_servers, is_fork_server, model_processes
from tests.support.models.python_scripts import IDENTITY, Models, execute_body, only, python_request
from tests.support.waiting import wait_until
from weir.worker.backends.python import children
from weir.worker.backends.python.process import ProcessDied, ProcessSpec, PythonProcess, StartFailed

FACTS = execute_body("""
    import random, signal
    facts = {
        "pid": os.getpid(), "group": os.getpgid(0), "session": os.getsid(0), "cwd": os.getcwd(),
        "cpus": sorted(os.sched_getaffinity(0)), "environment": dict(os.environ), "argv": sys.argv,
        "files": sorted({os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()}),
        "random": [random.random(), np.random.random()],
        "modules": sorted(sys.modules), "path": sys.path, "main": sys.modules["__main__"].__file__,
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)],
        "threads": len(os.listdir("/proc/self/task")), "stdin": os.readlink("/proc/self/fd/0"),
    }
    return [pb_utils.InferenceResponse([pb_utils.Tensor("A", np.array([json.dumps(facts)]))])]
""")


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


@pytest.fixture
def no_fork_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test with a fork server of its own, or with none."""
    fresh = children._ForkServer()
    monkeypatch.setattr(children, "_FORK_SERVER", fresh)
    yield
    if fresh._process is not None:
        fresh._process.kill()
        fresh._process.wait()
        assert fresh._control is not None
        fresh._control.close()


def facts_of(process: Any) -> dict[str, Any]:
    facts = json.loads(only(process.execute([python_request()])).outputs[0].to_numpy()[0])
    assert facts["pid"] == process.pid
    return facts


def is_forked(process: PythonProcess) -> bool:
    return psutil.Process(process.pid).ppid() != os.getpid()


def test_a_forked_process_is_as_one_that_was_started_as_a_command(
    models: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("UNTIL_NOW", "seen")
    with models.running(IDENTITY):  # the server runs before these change
        monkeypatch.setenv("FOR_THE_MODEL", "seen \udc80")
        monkeypatch.setenv("NATS_URL", "secret")
        monkeypatch.delenv("UNTIL_NOW")
        monkeypatch.chdir(tmp_path)
        with models.running(FACTS) as process:
            assert is_forked(process)
            forked = facts_of(process)
        monkeypatch.setattr(children._ForkServer, "fork", lambda *_: None)
        with models.running(FACTS) as process:
            assert not is_forked(process)
            spawned = facts_of(process)
    for facts in (forked, spawned):
        assert facts["group"] == facts["session"] == facts["pid"]
        assert facts["environment"]["FOR_THE_MODEL"] == "seen \udc80"
        assert not {"NATS_URL", "UNTIL_NOW"} & facts["environment"].keys()
        facts["files"] = sorted({name.partition(":")[0] for name in facts["files"] if "/proc/" not in name})
        assert facts["cwd"] == str(tmp_path)
    differing = {name for name in forked if forked[name] != spawned[name]}
    assert differing <= {"pid", "group", "session", "random", "path"}
    assert forked["path"][2:] == spawned["path"][2:], "besides the folders of the model"


def test_forked_processes_draw_different_random_numbers(models: Models) -> None:
    with models.running(FACTS) as one, models.running(FACTS) as other:
        assert is_forked(one)
        drawn = [number for process in (one, other) for number in facts_of(process)["random"]]
    assert len(set(drawn)) == 4


def test_variables_that_libraries_read_at_their_start_prevent_a_fork(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    with models.running(IDENTITY):
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        with models.running(FACTS) as process:
            assert not is_forked(process)
            assert facts_of(process)["environment"]["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("body", "ending"),
    [("os._exit(7)", "ended with status 7"), ("os.kill(os.getpid(), 11)", "was ended by SIGSEGV")],
)
def test_how_a_forked_process_ended_is_known(models: Models, body: str, ending: str) -> None:
    with models.running(execute_body(body)) as process:
        assert is_forked(process)
        with pytest.raises(ProcessDied, match=ending):
            process.execute([python_request()])


def test_the_id_is_taken_until_the_process_is_closed(models: Models) -> None:
    with models.running(IDENTITY) as process:
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
        assert process.close() == "was ended by SIGKILL"
        assert not psutil.pid_exists(process.pid)


def test_the_fork_server_has_one_thread_and_no_files_of_its_processes(models: Models) -> None:
    with models.running(IDENTITY):
        (server,) = fork_servers()
        files = server.num_fds()
        with models.running(IDENTITY), models.running(IDENTITY):
            assert server.num_threads() == 1
            assert server.num_fds() == files + 4, "for each process its pidfd and its status socket"
        wait_until(lambda: server.num_fds() == files)


def test_processes_end_with_the_fork_server_which_is_started_again(models: Models, no_fork_server: None) -> None:
    with models.running(IDENTITY) as process:
        (server,) = [server for server in fork_servers() if process.pid in [c.pid for c in server.children()]]
        model = psutil.Process(process.pid)
        server.kill()
        psutil.wait_procs([server], timeout=10)
        wait_until(lambda: not model.is_running() or model.status() == psutil.STATUS_ZOMBIE)
        with pytest.raises(ProcessDied):
            process.execute([python_request()])
        with models.running(IDENTITY) as another:
            assert is_forked(another)
            only(another.execute([python_request()]))


def test_a_worker_that_is_killed_takes_fork_server_and_processes_along(models: Models) -> None:
    folder = models.write(IDENTITY)
    code = f"""
import sys, time
from pathlib import Path
from weir.worker.backends.python.process import ProcessSpec, PythonProcess
process = PythonProcess(ProcessSpec(Path({str(folder)!r}), 1))
process.load(30)
print(process.pid, flush=True)
time.sleep(60)
"""
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    pid = int(worker.stdout.readline())
    (model,) = model_processes(worker.pid)
    (server,) = fork_servers(worker.pid)
    assert model.pid == pid
    assert is_fork_server(model)
    worker.kill()
    worker.wait()
    worker.stdout.close()
    psutil.wait_procs([model, server], timeout=10)
    assert not model.is_running()
    assert not server.is_running()


def test_a_fork_server_with_threads_is_not_used(
    models: Models, no_fork_server: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for _ in range(2):
        with models.running(IDENTITY) as process:
            assert not is_forked(process)
            only(process.execute([python_request()]))
    assert children._FORK_SERVER._process is not None
    assert children._FORK_SERVER._process.returncode is not None


def test_a_model_that_fails_to_load_fails_in_a_fork(models: Models) -> None:
    before = model_processes()
    with pytest.raises(StartFailed, match="no such thing"):
        PythonProcess(ProcessSpec(models.write("raise ValueError('no such thing')"), 1)).load(30)
    assert model_processes() == before

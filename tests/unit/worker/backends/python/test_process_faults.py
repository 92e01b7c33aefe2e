"""Errors of Python models, what they affect, and what remains when a process dies."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.support.models.processes import model_processes
from tests.support.models.python_scripts import IDENTITY, Models, error_of, execute_body, numbers, only, python_request
from tests.support.waiting import wait_until
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.telemetry.log_settings import LogSettings
from weir.worker.backends.python import process as python_process
from weir.worker.backends.python.process import ProcessDied, ProcessSpec, PythonProcess

JSON_LOG, TEXT_LOG = LogSettings(log_format="json"), LogSettings()


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class TestErrors:
    def test_each_response_has_its_own(self, models: Models) -> None:
        doors_own = {ErrorCode.UNAUTHENTICATED, ErrorCode.PERMISSION_DENIED}
        codes = [code for code in ErrorCode if code not in doors_own]
        with models.running(
            execute_body("""
            return [
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor("A", np.zeros(1))],
                    error=pb_utils.TritonError("no " + name, getattr(pb_utils.TritonError, name)),
                )
                for name in (request.request_id() for request in requests[:-1])
            ] + [pb_utils.InferenceResponse(error=pb_utils.TritonError("default"))]
        """)
        ) as process:
            responses = process.execute([*(python_request(code.name) for code in codes), python_request()])
        errors = [(response.error.code, response.error.message) for response in responses if response.error]
        assert errors == [*((code, f"no {code.name}") for code in codes), (ErrorCode.INTERNAL, "default")]
        assert not any(response.outputs for response in responses)

    @pytest.mark.parametrize(
        "body,message",
        [
            ("return {}", "Expected a list in the execute return, found type '<class 'dict'>'."),
            ("return 'no'", "Expected a list in the execute return, found type '<class 'str'>'."),
            (
                "return []",
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                "InferenceRequest(s) size is:2, and InferenceResponse(s) size is:0\n",
            ),
            (
                "return [pb_utils.InferenceResponse(), 7]",
                "Expected an 'InferenceResponse' object in the execute function return list, "
                "found type '<class 'int'>'.",
            ),
            (
                "raise ValueError('broken')",
                "ValueError: broken\n\nAt:\n  1/model.py(8): execute\n",
            ),
            (
                "return [pb_utils.Tensor('', np.zeros(1))]",
                "TritonModelException: Tensor name cannot be an empty string.\n\nAt:\n  1/model.py(8): execute\n",
            ),
            ("sys.exit(3)", "SystemExit: 3\n\nAt:\n  1/model.py(8): execute\n"),
            ("raise KeyboardInterrupt('no')", "KeyboardInterrupt: no\n\nAt:\n  1/model.py(8): execute\n"),
        ],
    )
    def test_an_error_fails_the_whole_batch_and_the_model_keeps_running(
        self, models: Models, body: str, message: str
    ) -> None:
        with models.running(execute_body(body)) as process:
            for _ in range(2):
                for response in process.execute([python_request(), python_request()]):
                    assert response.error is not None
                    assert response.error.code is ErrorCode.INTERNAL
                    assert response.error.message == (
                        f"Failed to process the request(s) for model 'm_0_0', message: {message}"
                    )

    @pytest.mark.parametrize(
        "body",
        [
            "return [pb_utils.InferenceResponse(parameters={'a': 2**80})]",
            "return [pb_utils.InferenceResponse([pb_utils.Tensor('A', np.array(['\\ud800'], object))])]",
            "raise ValueError('\\ud800')",
        ],
    )
    def test_responses_that_can_not_be_sent(self, models: Models, body: str) -> None:
        with models.running(execute_body(body)) as process:
            assert error_of(process.execute([python_request()])).code is ErrorCode.INTERNAL
            assert error_of(process.execute([python_request()])).code is ErrorCode.INTERNAL

    @pytest.mark.parametrize(
        "source,expected",
        [
            (
                "class TritonPythonModel:\n  def initialize(self, args): lorem\n  def execute(self, r): pass",
                "NameError: name 'lorem' is not defined\n\nAt:\n  1/model.py(2): initialize\n",
            ),
            ("x = 1", "AttributeError: module '1.model' has no attribute 'TritonPythonModel'"),
            ("class TritonPythonModel: pass", "TritonPythonModel has no method 'execute'"),
            ("import not_there_at_all", "ModuleNotFoundError: No module named 'not_there_at_all'"),
            ("def broken(:", "SyntaxError"),
            (
                "import os; os._exit(7)",
                "Stub process '' is not healthy. The model's process ended with status 7 while it was loading the",
            ),
            ("import time; time.sleep(60)", "the model's process did not load the model within 1 s"),
        ],
    )
    def test_models_that_do_not_load(self, models: Models, source: str, expected: str) -> None:
        folder = models.write(source)
        process = PythonProcess(ProcessSpec(folder, 1))
        with pytest.raises(WeirError) as caught:
            process.load(1 if "sleep" in source else 30)
        assert caught.value.code is ErrorCode.INTERNAL
        assert expected in caught.value.message
        assert str(folder) not in caught.value.message
        assert process.is_closed

    def test_a_missing_file(self, models: Models) -> None:
        folder = models.write(IDENTITY)
        with pytest.raises(WeirError, match=r"Python model file not found in 'model-[0-9a-f]+/1/other\.py'"):
            PythonProcess(ProcessSpec(folder, 1, "other.py")).load(30)


class TestUserCode:
    def test_modules_of_a_model_precede_weirs(self, models: Models) -> None:
        ours = ("schemas", "worker", "bus", "gateway", "stub", "weir")
        source = (
            "import "
            + ", ".join(ours)
            + execute_body(f"""
            from .beside import here
            names = [module.mine for module in ({", ".join(ours)})] + [here]
            return [pb_utils.InferenceResponse([pb_utils.Tensor("A", np.array(names))])]
        """)
        )
        files = {f"1__{name}": f"mine = 'version {name}'" for name in ours[:3]}
        files |= {name: f"mine = 'model {name}'" for name in ours}
        with models.running(source, **files, **{"1__beside": "here = 'relative'"}) as process:
            response = only(process.execute([python_request()]))
        names = [name.decode() for name in response.outputs[0].to_numpy()]
        assert names[:3] == [f"version {name}" for name in ours[:3]]
        assert names[3:6] == [f"model {name}" for name in ours[3:]]
        assert names[6] == "relative"

    def test_sees_neither_our_folder_nor_our_secrets(self, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WEIR_TOKEN", "secret")
        monkeypatch.setenv("NATS_URL", "nats://user:secret@host")
        monkeypatch.setenv("FOR_THE_MODEL", "seen")
        with models.running(
            execute_body("""
            reported = [[p for p in sys.path if p.endswith("python_stub")], dict(os.environ)]
            return [pb_utils.InferenceResponse([pb_utils.Tensor("A", np.array([json.dumps(reported)]))])]
        """)
        ) as process:
            response = only(process.execute([python_request()]))
        ours_on_path, environment = json.loads(response.outputs[0].to_numpy()[0])
        assert ours_on_path == []
        assert environment["FOR_THE_MODEL"] == "seen"
        assert not [name for name in environment if name.startswith(("WEIR_", "NATS_"))]

    def test_prints_go_to_the_log(self, models: Models, capfd: pytest.CaptureFixture[str]) -> None:
        with models.running(
            execute_body("""
            print("to stdout")
            os.write(1, b"raw\\n")
            sys.stderr.write("to stderr\\n")
            pb_utils.Logger.log_info("logged")
            input_is_empty = sys.stdin.read() == ""
            return [pb_utils.InferenceResponse([pb_utils.Tensor("A", np.array([input_is_empty]))])]
        """)
        ) as process:
            response = only(process.execute([python_request()]))
            out, err = capfd.readouterr()
        assert response.outputs[0].to_numpy().tolist() == [True]
        assert out.splitlines() == ["to stdout", "raw"]
        assert "to stderr" in err
        assert err.rstrip().endswith('] "logged"')

    def test_arguments_and_the_end_of_a_model(self, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        source = """
            import json
            from pathlib import Path

            class TritonPythonModel:
                def initialize(self, args):
                    self.folder = Path(args["model_repository"])
                    (self.folder / "args").write_text(json.dumps(args))

                def execute(self, requests):
                    pass

                def finalize(self):
                    (self.folder / "finalized").touch()
        """
        with models.running(source) as process:
            pid = process.pid
        (folder,) = models.root.iterdir()
        args = json.loads((folder / "args").read_text())
        assert (args["model_name"], args["model_version"], args["model_instance_kind"]) == ("m", "1", "CPU")
        assert (folder / "finalized").exists()
        assert not (folder / "1" / "__pycache__").exists()
        assert pid is not None
        assert is_gone(pid)

    def test_a_model_that_will_not_end_is_killed(self, models: Models) -> None:
        with models.running("""
            import subprocess, sys, time
            import numpy as np
            import triton_python_backend_utils as pb_utils

            class TritonPythonModel:
                def execute(self, requests):
                    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
                    return [pb_utils.InferenceResponse([pb_utils.Tensor("PID", np.array([helper.pid]))])]

                def finalize(self):
                    time.sleep(600)
        """) as process:
            (helper,) = only(process.execute([python_request()])).outputs[0].to_numpy().tolist()
            pid = process.pid
            process.stop(0.2)
        assert is_gone(pid)
        wait_until(lambda: is_gone(helper))


def open_files() -> set[tuple[str, str]]:
    """The open files of this process: (descriptor, what it is)."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


class TestDeath:
    def test_many_kills_during_execute(self, models: Models, tmp_path: Path) -> None:
        running = tmp_path / "running"
        os.mkfifo(running)
        source = execute_body("""
            open(requests[0].request_id(), "w").close()
            time.sleep(60)
        """)
        models.process(source).close()
        gc.collect()  # the files of earlier tests are closed before these are counted
        files_before = open_files()
        children_before = model_processes()
        for _ in range(15):
            with models.running(source) as process:
                outcome: list[BaseException] = []

                def run(outcome: list[BaseException] = outcome) -> None:
                    try:
                        process.execute([python_request(str(running), inputs=[numbers(1, 50_000)])])
                    except ProcessDied as death:
                        outcome.append(death)

                executing = threading.Thread(target=run)
                executing.start()
                running.read_text()  # returns once the model is in its execute
                os.kill(process.pid, signal.SIGKILL)
                executing.join()
                assert "SIGKILL" in str(outcome[0])
                assert process.is_closed
        assert open_files() - files_before == set()
        assert model_processes() == children_before

    def test_a_process_that_exits_runs_nothing_any_more(self, models: Models) -> None:
        with models.running(
            execute_body("""
            if requests[0].request_id() == "die":
                os._exit(9)
            return [pb_utils.InferenceResponse() for _ in requests]
        """)
        ) as process:
            with pytest.raises(ProcessDied, match="ended with status 9"):
                process.execute([python_request("die")])
            with pytest.raises(ProcessDied, match="not running"):
                process.execute([python_request("live")])

    def test_a_process_that_writes_into_the_channel_is_killed(self, models: Models) -> None:
        source = execute_body("""
            for fd in map(int, os.listdir("/proc/self/fd")):
                try:
                    os.write(fd, b"progress: 100 %")
                except OSError:
                    pass
            return [pb_utils.InferenceResponse() for _ in requests]
        """)
        with models.running(source) as process, pytest.raises(ProcessDied):
            process.execute([python_request()])

    def test_a_forked_process_does_not_hide_the_death(self, models: Models) -> None:
        with (
            models.running(
                execute_body("""
            if os.fork() == 0:
                time.sleep(600)
            os._exit(1)
        """)
            ) as process,
            pytest.raises(ProcessDied),
        ):
            process.execute([python_request()])

    def test_a_kill_ends_a_start(self, models: Models, tmp_path: Path) -> None:
        running = tmp_path / "running"
        os.mkfifo(running)
        source = f"import time\nopen({str(running)!r}, 'w').close()\ntime.sleep(60)\n"
        process = models.process(source)
        killing = threading.Thread(target=lambda: (running.read_text(), process.kill()))
        killing.start()
        with pytest.raises(WeirError, match="was ended by SIGKILL while it was loading the model"):
            process.load(30)
        killing.join()
        assert process.is_closed

    def test_a_process_that_dies_before_it_reads_a_command(self, models: Models) -> None:
        process = models.process(IDENTITY)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(WeirError, match="ended by SIGKILL while it was loading the model"):
            process.load(30)

    def test_it_does_not_depend_on_the_thread_that_started_it(self, models: Models) -> None:
        process = models.process(IDENTITY)
        try:
            starting = threading.Thread(target=process.load, args=(30,))
            starting.start()
            starting.join()
            only(process.execute([python_request(inputs=[numbers(3)])]))
        finally:
            process.stop(5)

    @pytest.mark.parametrize("body", ["time.sleep(60)", "sum(range(10**12))"])
    def test_a_process_ends_with_its_worker(self, models: Models, tmp_path: Path, body: str) -> None:
        """The second body never lets another Python thread of the process run."""
        running = tmp_path / "running"
        os.mkfifo(running)
        source = execute_body(f"""
            with open(requests[0].request_id(), "w") as file:
                file.write(str(os.getpid()))
            {body}
        """)
        worker = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sys; from pathlib import Path\n"
                "from weir.bus.payloads.arena import PayloadReader\n"
                "from weir.schemas.core.requests import InferRequest\n"
                "from weir.worker.backend_api.interface import Execution\n"
                "from weir.worker.backends.python.process import ProcessSpec, PythonProcess\n"
                "process = PythonProcess(ProcessSpec(Path(sys.argv[1]), 1))\n"
                "process.load(30)\n"
                "process.execute([InferRequest('m', '1', sys.argv[2])], Execution(PayloadReader()))\n",
                str(models.write(source)),
                str(running),
            ],
            cwd=Path(__file__).parents[5],
        )
        try:
            pid = int(running.read_text())
            assert not is_gone(pid)
        finally:
            worker.kill()
            worker.wait()
        wait_until(lambda: is_gone(pid))


def test_kill_does_not_wait_for_a_process_that_is_slow_to_die(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog kills the processes of all models in one thread: none may make it wait for the end of another."""
    killed: list[int] = []
    child = models.process(IDENTITY)
    with monkeypatch.context() as patch:
        patch.setattr(
            python_process.os, "killpg", lambda pid, _signal: killed.append(pid)
        )  # as one stuck in the kernel
        closing = threading.Thread(target=child.close)
        closing.start()
        wait_until(lambda: bool(killed))
        killing = threading.Thread(target=child.kill, args=("it hangs",))
        killing.start()
        killing.join(10)
        assert not killing.is_alive()
        assert closing.is_alive()
    os.kill(child.pid, signal.SIGKILL)
    closing.join(10)
    assert not closing.is_alive()


class TestTracebacks:
    SOURCE = """
        import threading
        thread = threading.Thread(target=lambda: {}["of a thread"], name="mine")
        thread.start()
        thread.join()
        raise ValueError("of\\nexecute")
    """

    def logged(self, models: Models, capfd: pytest.CaptureFixture[str]) -> str:
        with models.running(execute_body(self.SOURCE)) as process:
            error_of(process.execute([python_request()]))
        return capfd.readouterr().err

    def test_are_json_where_the_log_is(
        self, models: Models, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(python_process, "current_settings", lambda: JSON_LOG)
        thread, execute = map(json.loads, self.logged(models, capfd).splitlines())
        assert thread["message"] == "thread 'mine' of the model ended with an exception"
        assert thread["exception"].endswith("KeyError: 'of a thread'")
        assert (execute["message"], execute["level"]) == ("the model raised an exception", "error")
        assert execute["exception"].startswith("Traceback (most recent call last):\n")
        assert execute["exception"].endswith("ValueError: of\nexecute")

    def test_follow_their_entry_as_indented_lines(
        self, models: Models, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(python_process, "current_settings", lambda: TEXT_LOG)
        lines = self.logged(models, capfd).splitlines()
        entries = [line for line in lines if not line.startswith("    ")]
        assert [line.partition("] ")[2] for line in entries] == [
            "\"thread 'mine' of the model ended with an exception\"",
            '"the model raised an exception"',
        ]
        assert lines[-2:] == ["    ValueError: of", "    execute"]

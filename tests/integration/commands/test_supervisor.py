"""The supervisor with real processes: stand-in roles, a real nats-server, real signals.

The supervisor runs in a process of its own, as in `weir serve`. Roles are small scripts with the same connections to
the supervisor as real ones; they record their events in a journal.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.waiting import wait_until

ROLE = """
import json, os, signal, sys, time
from weir.runtime.readiness import announce_failure, announce_ready, watch_parent

name, folder, behaviour = sys.argv[1:4]
drawn = dict(zip(sys.argv[4::2], sys.argv[5::2]))

def note(event, **more):
    line = json.dumps({"role": name, "event": event, "pid": os.getpid(), **more}) + "\\n"
    fd = os.open(folder + "/journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, line.encode())
    os.close(fd)

def told_to_end(number, frame):
    note("told")
    if behaviour != "stubborn":
        time.sleep(0.05)  # work that is finished
        note("ended")
        os._exit(0)

signal.signal(signal.SIGTERM, told_to_end)
watch_parent()
note("started", nats=os.environ.get("WEIR_NATS_URL"), drawn=drawn)
if behaviour == "refuses":
    announce_failure("port 8000 is taken")
    sys.exit(1)
if behaviour == "breaks":
    sys.exit(7)
if behaviour == "killed-once" and not os.path.exists(folder + "/killed"):
    open(folder + "/killed", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
while behaviour == "meets-gateway" and '"gateway", "event": "started"' not in open(folder + "/journal").read():
    time.sleep(0.005)
time.sleep(0.05)  # so that a role started too early would be seen
note("ready")
announce_ready(http_port=int(drawn.get("--http-port", 40000 + os.getpid() % 10000)))
if behaviour == "short-lived":
    sys.exit(5)
while True:
    signal.pause()
"""

PARENT = """
import functools, json, os, sys
from pathlib import Path
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.telemetry.logs import configure_logging
from weir.runtime.child_processes import RestartPolicy
from weir.supervisor.role import RoleSpec
from weir.errors import StartError
from weir.supervisor.supervisor import Supervisor

folder, wanted = Path(sys.argv[1]), json.loads(sys.argv[2])
configure_logging("supervisor")
kept = {"http_port": "--http-port"}


def prepare(name, behaviour):
    with (folder / "journal").open("a") as journal:
        journal.write(json.dumps({"role": name, "event": "prepared", "pid": os.getpid()}) + "\\n")
    if behaviour == "unprepared":
        raise StartError("its code is broken")

roles = [
    RoleSpec(name=name, argv=(sys.executable, str(folder / "role.py"), name, str(folder), behaviour),
             start_rank=0 if wanted["together"] else number, drain_rank=rank, kept_facts=kept,
             prepare=functools.partial(prepare, name, behaviour), is_optional=name == wanted["optional"])
    for number, (name, behaviour, rank) in enumerate(wanted["roles"])
]
nats = EmbeddedNats(folder / "data") if wanted["nats"] else None
policy = RestartPolicy(first_delay_s=0.02, longest_delay_s=0.05, budget=wanted["budget"])
supervisor = Supervisor(
    roles,
    nats=nats,
    on_ready=lambda facts: print(json.dumps({"facts": facts, "nats": nats.pid if nats else None}), flush=True),
    exit_timeout_s=wanted["exit_timeout_s"],
    policy=policy,
)
try:
    sys.exit(supervisor.run())
except StartError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)
"""

ROLES = [("scheduler", "", 1), ("worker", "", 2), ("gateway", "", 0)]


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def server_runs(data_dir: Path) -> bool:
    """Whether a nats-server holds its data folder."""
    if not data_dir.exists():
        return False
    with (data_dir / "lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Serving:
    """One supervisor process and the journal of its roles."""

    def __init__(self, folder: Path, roles: list[tuple[str, str, int]], **wanted: Any) -> None:
        (folder / "role.py").write_text(ROLE)
        (folder / "parent.py").write_text(PARENT)
        self.folder = folder
        self.errors = folder / "stderr"
        settings = {
            "roles": roles,
            "nats": False,
            "budget": 10,
            "exit_timeout_s": 10.0,
            "together": False,
            "optional": "",
        }
        settings |= wanted
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, folder / "parent.py", folder, json.dumps(settings)],
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    def ready(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.errors.read_text()
        return json.loads(line)

    def journal(self, event: str) -> list[dict[str, Any]]:
        path = self.folder / "journal"
        entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [entry for entry in entries if entry["event"] == event]

    def roles_that(self, event: str) -> list[str]:
        return [entry["role"] for entry in self.journal(event)]

    def pid(self, role: str) -> int:
        return [entry["pid"] for entry in self.journal("ready") if entry["role"] == role][-1]

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=20)

    def nothing_is_left(self) -> bool:
        return not any(alive(entry["pid"]) for entry in self.journal("started"))


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []

    def start(roles: list[tuple[str, str, int]] = ROLES, **wanted: Any) -> Serving:
        started.append(Serving(tmp_path, roles, **wanted))
        return started[-1]

    yield start
    for serving in started:
        with serving.process:
            serving.process.kill()
        wait_until(serving.nothing_is_left)


def test_ranks_start_in_order_each_once_the_one_before_is_ready(serve: Callable[..., Serving]) -> None:
    serving = serve()
    facts = serving.ready()["facts"]
    assert list(facts) == ["scheduler", "worker", "gateway"]
    assert facts["gateway"]["http_port"] > 0
    lines = [json.loads(line) for line in (serving.folder / "journal").read_text().splitlines()]
    assert [(line["role"], line["event"]) for line in lines if line["event"] != "prepared"] == [
        (role, event) for role in facts for event in ("started", "ready")
    ]


def test_the_roles_of_a_rank_start_together(serve: Callable[..., Serving]) -> None:
    serving = serve([("worker", "meets-gateway", 2), ("gateway", "", 0)], together=True)
    wait_until(lambda: sorted(serving.roles_that("ready")) == ["gateway", "worker"])
    assert list(serving.ready()["facts"]) == ["worker", "gateway"]


def test_a_role_is_prepared_before_its_first_start_and_while_the_rank_before_starts(
    serve: Callable[..., Serving],
) -> None:
    serving = serve(nats=True)
    serving.ready()
    os.kill(serving.pid("worker"), signal.SIGKILL)
    wait_until(lambda: serving.roles_that("ready").count("worker") == 2)
    lines = [json.loads(line) for line in (serving.folder / "journal").read_text().splitlines()]
    events = [(line["role"], line["event"]) for line in lines]
    for role, before in (("worker", "scheduler"), ("gateway", "worker")):
        assert events.index((role, "prepared")) < events.index((before, "ready"))
    assert sorted(serving.roles_that("prepared")) == ["gateway", "scheduler", "worker"]


def test_a_server_starts_and_runs_on_without_an_optional_role(serve: Callable[..., Serving]) -> None:
    serving = serve([("scheduler", "", 1), ("console", "refuses", 0), ("gateway", "", 0)], optional="console")
    assert serving.ready()["facts"]["console"] == {}
    assert "console can't be started: port 8000 is taken; the server runs without it" in serving.errors.read_text()
    assert serving.end() == 0


def test_an_optional_role_that_dies_too_often_is_not_started_again(serve: Callable[..., Serving]) -> None:
    serving = serve([("scheduler", "", 1), ("console", "short-lived", 0)], optional="console", budget=2)
    serving.ready()
    message = "its restart budget is spent, the server runs without it"
    wait_until(lambda: message in serving.errors.read_text())
    assert alive(serving.pid("scheduler"))
    assert serving.end() == 0


@pytest.mark.parametrize("nats", [False, True], ids=["no nats-server", "nats-server"])
@pytest.mark.parametrize("role", ["scheduler", "gateway"])
def test_a_role_that_can_t_be_prepared_ends_the_server(serve: Callable[..., Serving], role: str, nats: bool) -> None:
    serving = serve([(name, "unprepared" if name == role else "", rank) for name, _, rank in ROLES], nats=nats)
    assert serving.process.wait(timeout=20) == 1
    assert serving.errors.read_text().splitlines()[-1] == "error: its code is broken"
    assert serving.nothing_is_left()
    assert not server_runs(serving.folder / "data")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_each_rank_finish_before_the_next(serve: Callable[..., Serving], number: signal.Signals) -> None:
    serving = serve()
    serving.ready()
    # To the whole process group, as a terminal does at Ctrl-C.
    os.killpg(serving.process.pid, number)
    assert serving.process.wait(timeout=20) == 0
    lines = [json.loads(line) for line in (serving.folder / "journal").read_text().splitlines()]
    entries = [line for line in lines if line["event"] not in ("prepared", "started", "ready")]
    assert [(entry["role"], entry["event"]) for entry in entries] == [
        (role, event) for role in ("gateway", "scheduler", "worker") for event in ("told", "ended")
    ]
    assert serving.nothing_is_left()


def test_a_killed_role_comes_back_alone_on_its_port(serve: Callable[..., Serving]) -> None:
    serving = serve()
    port = serving.ready()["facts"]["gateway"]["http_port"]
    first = serving.pid("gateway")
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: serving.roles_that("ready").count("gateway") == 2)
    assert serving.pid("gateway") != first
    assert serving.journal("started")[-1]["drawn"] == {"--http-port": str(port)}
    assert serving.roles_that("started") == ["scheduler", "worker", "gateway", "gateway"]
    assert serving.end() == 0
    log = serving.errors.read_text()
    assert (
        f"gateway (process {first}) was killed by SIGKILL, possibly by the out-of-memory killer; restarting it in"
        in log
    )


def test_a_role_killed_before_it_was_ever_ready_is_started_again(serve: Callable[..., Serving]) -> None:
    serving = serve([("worker", "killed-once", 0)])
    assert "worker" in serving.ready()["facts"]
    assert serving.roles_that("started") == ["worker", "worker"]


def test_every_role_can_be_killed_again_and_again(serve: Callable[..., Serving]) -> None:
    serving = serve(budget=100)
    serving.ready()
    for count in range(2, 6):
        for role in ("worker", "scheduler", "gateway"):
            os.kill(serving.pid(role), signal.SIGKILL)
        wait_until(lambda: all(serving.roles_that("ready").count(role) == count for role, *_ in ROLES))  # noqa: B023
    children = psutil.Process(serving.process.pid).children()
    assert len(children) == 3
    assert serving.end() == 0


def test_a_killed_nats_server_comes_back_where_it_was_and_roles_stay(serve: Callable[..., Serving]) -> None:
    serving = serve(nats=True)
    first = serving.ready()["nats"]
    url = serving.journal("started")[0]["nats"]
    assert url.startswith("nats://weir:")
    port = int(url.rpartition(":")[2])

    def answers() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            return connection.recv(5) == b"INFO "
        return False

    assert answers()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: "nats-server is ready" in serving.errors.read_text().partition("SIGKILL")[2])
    assert answers()
    assert len(serving.journal("started")) == 3
    assert serving.end() == 0
    assert not answers()


def test_a_role_that_dies_too_often_ends_the_server_in_order(serve: Callable[..., Serving]) -> None:
    serving = serve([("scheduler", "", 1), ("worker", "short-lived", 2), ("gateway", "", 0)], budget=4)
    assert serving.process.wait(timeout=20) == 3
    assert serving.roles_that("started").count("worker") == 4
    assert serving.roles_that("ended")[-1] == "scheduler"
    assert "exited with status 5; its restart budget is spent, the server exits" in serving.errors.read_text()
    assert serving.nothing_is_left()


def test_a_role_that_says_why_it_can_t_start_ends_the_server_with_that_line(serve: Callable[..., Serving]) -> None:
    serving = serve([("scheduler", "", 1), ("worker", "", 2), ("gateway", "refuses", 0)], nats=True)
    assert serving.process.wait(timeout=20) == 1
    assert serving.errors.read_text().splitlines()[-1] == "error: port 8000 is taken"
    assert serving.roles_that("ended") == ["scheduler", "worker"]
    assert serving.nothing_is_left()


def test_a_role_that_ends_before_it_is_ready_ends_the_server(serve: Callable[..., Serving]) -> None:
    serving = serve([("scheduler", "breaks", 1), ("worker", "", 2)])
    assert serving.process.wait(timeout=20) == 1
    assert serving.errors.read_text().splitlines()[-1] == "error: scheduler exited with status 7 before it was ready"
    assert serving.roles_that("started") == ["scheduler"]


def test_a_command_that_can_t_be_run_ends_the_server(serve: Callable[..., Serving], tmp_path: Path) -> None:
    (tmp_path / "data").touch()  # where nats-server's folder should be
    serving = serve(nats=True)
    assert serving.process.wait(timeout=20) == 1
    last = serving.errors.read_text().splitlines()[-1]
    assert last == f"error: data folder {tmp_path / 'data'} can't be used: File exists"
    assert serving.journal("started") == []


def test_a_role_that_will_not_end_is_killed_when_time_is_up(serve: Callable[..., Serving]) -> None:
    serving = serve([("scheduler", "", 1), ("gateway", "stubborn", 0)], exit_timeout_s=0.3, nats=True)
    serving.ready()
    asked = time.monotonic()
    assert serving.end() == 1
    assert time.monotonic() - asked >= 0.3
    assert serving.roles_that("told")[0] == "gateway"
    assert serving.nothing_is_left()


def test_a_second_signal_ends_all_at_once(serve: Callable[..., Serving]) -> None:
    serving = serve([("scheduler", "", 1), ("gateway", "stubborn", 0)], exit_timeout_s=60.0, nats=True)
    nats = serving.ready()["nats"]
    serving.process.terminate()
    wait_until(lambda: serving.roles_that("told") == ["gateway"])
    assert serving.end() == 1
    assert serving.nothing_is_left()
    assert not alive(nats)


def test_a_signal_during_the_start_stops_it(serve: Callable[..., Serving]) -> None:
    serving = serve(nats=True)
    wait_until(lambda: serving.roles_that("started") == ["scheduler"])
    assert serving.end() == 0
    assert "gateway" not in serving.roles_that("started")
    assert serving.nothing_is_left()


@pytest.mark.parametrize("attempt", range(3))
def test_nothing_outlives_a_killed_supervisor(serve: Callable[..., Serving], attempt: int) -> None:
    serving = serve([*ROLES, ("stubborn", "stubborn", 3)], nats=True)
    nats = serving.ready()["nats"]
    roles = [entry["pid"] for entry in serving.journal("ready")]
    assert all(map(alive, [nats, *roles]))
    serving.process.kill()
    serving.process.wait()
    wait_until(lambda: not any(map(alive, [nats, *roles])))
    assert serving.roles_that("told") == []


def test_serve_tells_a_taken_port_and_a_folder_in_use_in_one_line(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
    command = [sys.executable, "-m", "weir", "serve", "--model-repository", tmp_path, "--data-dir", tmp_path / "data"]

    def complaint(*options: str) -> str:
        ran = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=30)
        assert ran.returncode == 1
        assert ran.stdout == ""
        # The limits that the server has found come before what it fails at later.
        return "".join(
            line for line in ran.stderr.splitlines(keepends=True) if " limits: " not in line.replace('"', " ")
        )

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert complaint(f"--http-port={port}", "--grpc-port=0", "--metrics-port=0") == (
            f"error: can't listen for HTTP requests at 127.0.0.1:{port}: the port is in use\n"
        )
    from weir.bus.nats.embedded_server import EmbeddedNats

    holder = EmbeddedNats(tmp_path / "data")
    holder.start()
    try:
        assert complaint("--http-port=0", "--grpc-port=0", "--metrics-port=0") == (
            f"error: data folder {tmp_path / 'data'} is in use by another server (process {os.getpid()}): "
            "choose another with --data-dir\n"
        )
    finally:
        holder.stop()

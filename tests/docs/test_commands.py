"""Every documented command works as shown.

A line of an `sh` block runs unchanged except for the ports of the server. `make` targets take minutes or the documented
ports, so their recipes are checked (`make -n`), and the programs behind `demo` and `serve` run here; the slow test
test_first_commands.py runs both. `make test`, `lint`, `bench` and `faults` have no test; `.ci/run` runs the first two.
"""

from __future__ import annotations

import itertools
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.docs.pages import OWN_MODEL, REPOSITORIES, ROOT, Block, all_blocks, commands
from tests.support.servers.demo import DOCUMENTED_PORTS, DRAWN_PORTS, Served, environment, in_venv
from weir.demo.command import DEMO_FOLDER
from weir.demo.pictures import LINES
from weir.demo.serve import serve_options
from weir.options import options_of

RECIPES = {
    "make demo": "-m weir demo",
    "make serve": "-m weir demo --serve",
    "make test": '-m pytest -n 2 --dist loadfile -m "not slow and not gpu and not containers and not timing',
    "make lint": "-m ruff check",
    "make bench": "-m benchmarks.compare",
    "make faults": "-m tests.faults --table",
}
"""What is behind each documented target."""

EXAMPLE = ".venv/bin/python -m examples."
FAULTS = ".venv/bin/python -m tests.faults "
"""They take minutes; test_fault_mix.py runs a part of what is behind them."""

OF_EVENTS = (".venv/bin/python -m examples.events.", "node examples/events/")
"""One's input is the other's output: test_events.py runs them in order."""

PERF_ANALYZER = "perf_analyzer "
"""Triton's load tester: test_load_testers.py runs it where it is installed."""

INSTALLATION = "pip install '.[cpu]'"
"""test_first_commands.py runs it in a fresh clone."""

ROLES_APART = "docs/serving.md"
THREE_HOSTS = "docs/operations.md"


def reply(kind: str) -> list[str]:
    return [
        command
        for page, command in commands()
        if command.startswith(kind)
        and not command.startswith((*OF_EVENTS, *OWN_MODEL))
        and page not in (THREE_HOSTS, REPOSITORIES)
    ]


def test_every_command_is_of_a_kind_that_is_tested() -> None:
    kinds = (
        "make ",
        "curl ",
        FAULTS,
        EXAMPLE,
        ".venv/bin/weir serve ",
        ".venv/bin/weir ",
        ".venv/bin/nats-server ",
        "WEIR_HOST_ID=",
        PERF_ANALYZER,
        INSTALLATION,
        *OF_EVENTS,
        *OWN_MODEL,
    )
    assert [line for page, line in commands() if page != REPOSITORIES and not line.startswith(kinds)] == []
    assert set(reply("make ")) == RECIPES.keys()


@pytest.mark.parametrize(("command", "recipe"), RECIPES.items())
def test_make_runs(command: str, recipe: str) -> None:
    would_run = subprocess.run([*command.split(), "-n"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert recipe in would_run


def test_make_serve_listens_where_the_pages_ask() -> None:
    """The tests draw ports, so that this is not seen by running the commands."""
    serve = options_of("serve")
    ports = {name: str(serve[f"{name.lower()}_port"].default) for name in DOCUMENTED_PORTS}
    given = {name: value for name, _, value in (option[2:].partition("=") for option in serve_options(DEMO_FOLDER))}
    ports |= {name: given[key] for name in ports if (key := f"{name.lower()}-port") in given}
    assert ports == DOCUMENTED_PORTS
    asked = {port for _, command in commands() for port in re.findall(r"localhost:(\d+)", command)}
    assert asked <= set(DOCUMENTED_PORTS.values())


def test_make_serve_prints_a_request_that_is_answered_with_a_label(served: Served) -> None:
    command = next(line for line in served.printed.splitlines() if "curl" in line)
    answer = subprocess.run(["bash", "-c", command], cwd=served.folder, capture_output=True, text=True, check=True)
    assert ":python" in answer.stdout


@pytest.mark.parametrize("command", reply("curl "))
def test_curl(command: str, served: Served) -> None:
    answer = subprocess.run(
        ["bash", "-c", served.here(command)], cwd=served.folder, capture_output=True, text=True, check=True
    )
    assert "magika" in answer.stdout
    assert '"error"' not in answer.stdout


@pytest.mark.parametrize("command", reply(EXAMPLE))
def test_example_client(command: str, served: Served) -> None:
    done = subprocess.run(in_venv(served.here(command)), cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    title = done.stdout.splitlines()[0]
    assert title.startswith(("Files recognised", "Speech in 8 streams", "Text read from", "Served by backends"))


def examples_with_output() -> list[tuple[Block, str]]:
    """Each `python` block, with the `text` block behind it, which shows what it prints."""
    pages = all_blocks()
    return [
        (block, following.text)
        for block, following in itertools.pairwise(pages)
        if block.language == "python" and following.language == "text"
    ]


@pytest.mark.parametrize(("block", "expected"), examples_with_output(), ids=lambda value: getattr(value, "page", ""))
def test_python_example(block: Block, expected: str, served: Served) -> None:
    done = subprocess.run(
        [sys.executable, "-c", served.here(block.text)],
        cwd=served.folder,
        env=environment(served),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # The last digits of a score may differ from one machine to another.
    assert [re.sub(r"(\.\d\d)\d+", r"\1", line) for line in done.stdout.splitlines()] == [
        re.sub(r"(\.\d\d)\d+", r"\1", line) for line in expected.splitlines()
    ]


def test_every_python_block_shows_what_it_prints() -> None:
    shown = [block for block, _ in examples_with_output()]
    assert [block for block in all_blocks() if block.language == "python" and block not in shown] == []


@pytest.mark.parametrize("command", reply(".venv/bin/weir serve "))
def test_weir_serve(command: str, served: Served) -> None:
    process = subprocess.Popen(
        [*in_venv(command), *DRAWN_PORTS],
        cwd=served.folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    ready = False
    while not ready and (line := process.stdout.readline()):
        ready = line.split()[:1] == ["magika"] and "READY" in line
    process.terminate()
    _, log = process.communicate(timeout=60)
    assert ready, log
    assert process.returncode == 0


@pytest.mark.parametrize("command", reply(".venv/bin/weir status"))
def test_weir_status(command: str, served: Served) -> None:
    done = subprocess.run(in_venv(command), cwd=served.folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("healthy: 1 host, 1 gateway, 1 scheduler, 1 worker")


@pytest.mark.parametrize("command", reply(".venv/bin/weir top"))
def test_weir_top(command: str, served: Served) -> None:
    done = subprocess.run(in_venv(command), cwd=served.folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 gateway, 1 scheduler, 1 worker" in done.stdout
    assert re.search(r"^magika .* ready$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("command", reply(".venv/bin/weir infer "))
def test_weir_infer(command: str, served: Served) -> None:
    done = subprocess.run(in_venv(command), cwd=served.folder, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    if "--json" in command:
        assert json.loads(done.stdout)["outputs"]
    else:
        assert re.match(r"request\n(  .*\n)+response of \w+, version 1, after [\d.]+ ms\n(  .*\n)+", done.stdout)


@pytest.mark.parametrize("command", reply(".venv/bin/weir doctor"))
def test_weir_doctor(command: str) -> None:
    done = subprocess.run(in_venv(command), cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout.startswith("CHECK          STATE    FINDING\ninstallation   ok"), done.stdout


def test_weir_traffic(served: Served) -> None:
    for command in [*reply(".venv/bin/weir traffic "), *reply(".venv/bin/weir history ")]:
        there = {**environment(), "WEIR_URL": served.here("localhost:8000")}
        done = subprocess.run(in_venv(command), cwd=served.folder, env=there, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        if command.split()[1] == "history":
            assert "traffic: no rule -> 1=90 2=10" in done.stdout
            continue
        assert done.stdout.startswith("magika: "), done.stdout
        if command.split()[2] == "set":
            assert "set by an operator" in done.stdout


@pytest.mark.parametrize("command", reply(".venv/bin/weir backends"))
def test_weir_backends_is_shown_as_it_is(command: str) -> None:
    done = subprocess.run(in_venv(command), cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (shown,) = (
        following.text for block, following in itertools.pairwise(all_blocks()) if block.text.strip() == command
    )
    # What is installed, and which GPUs there are, is each machine's own.
    titles, *rows = done.stdout.splitlines()
    assert titles.split() == shown.splitlines()[0].split()
    backends = [row.split()[0] for row in rows[: rows.index("")]]
    assert backends == [line.split()[0] for line in shown.splitlines()[1 : 1 + len(backends)]]


def test_code_on_pages_is_that_of_its_file() -> None:
    files = {path.read_text() for kind in ("agents", "backends") for path in (ROOT / "examples" / kind).glob("*/*.py")}
    assert {block.text for block in all_blocks() if block.language == "python3"} == files


@contextmanager
def started(roles: list[str], ports: dict[str, int], served: Served, folder: Path) -> Iterator[None]:
    """The documented commands, with these ports in place of the documented ones."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for role in roles:
            host, _, command = role.rpartition(" .venv/")
            chosen = dict([host.split("=")]) if host else {}
            for number, port in ports.items():
                command = command.replace(number, str(port))
            words = in_venv(f".venv/{command.removeprefix('.venv/')}".replace(".weir/nats", str(folder / "nats")))
            with (folder / f"log-{len(processes)}").open("w") as log:
                processes.append(
                    subprocess.Popen(words, cwd=served.folder, env=environment() | chosen, stdout=log, stderr=log)
                )
        yield
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(60)


def logs(folder: Path) -> str:
    return "".join(log.read_text() for log in sorted(folder.glob("log-*")))


def test_roles_apart(served: Served, tmp_path: Path) -> None:
    roles = [
        line
        for page, line in commands()
        if page == ROLES_APART and not line.startswith((".venv/bin/weir serve ", "make ", "curl "))
    ]
    (push,) = [line for line in roles if line.startswith(".venv/bin/weir push ")]
    roles.remove(push)
    assert len(roles) == 4
    ports = dict(zip(("4222", "8000", "8001", "8002"), free_ports(4), strict=True))
    with started(roles, ports, served, tmp_path):
        assert becomes_ready(f"http://127.0.0.1:{ports['8000']}/v2/models/magika/ready"), logs(tmp_path)
        pushing = in_venv(push.replace("4222", str(ports["4222"])))
        pushed = subprocess.run(
            pushing, cwd=served.folder, env=environment(), capture_output=True, text=True, check=True
        )
        assert "magika" in pushed.stdout + pushed.stderr


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_three_hosts_on_one_machine(served: Served, tmp_path: Path) -> None:
    *roles, look = [line for page, line in commands() if page == THREE_HOSTS]
    assert len(roles) == 8
    documented = ("4222", "8000", "8001", "8002", "9000", "9001", "9002")
    ports = dict(zip(documented, free_ports(len(documented)), strict=True))
    status = in_venv(look.replace("4222", str(ports["4222"])))
    with started(roles, ports, served, tmp_path):
        for gateway in ("8000", "9000"):
            assert becomes_ready(f"http://127.0.0.1:{ports[gateway]}/v2/health/ready", 100), logs(tmp_path)
        said = ""
        while not said.startswith("healthy: 3 hosts, 2 gateways, 2 schedulers, 3 workers"):
            said = subprocess.run(status, cwd=served.folder, env=environment(), capture_output=True, text=True).stdout
            print(said)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def becomes_ready(url: str, timeout_s: float = 40.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url) as answer:
                return bool(answer.status == 200)
        except OSError:
            time.sleep(0.1)
    return False


def test_the_demo_shows_real_networks_batches_and_a_killed_worker(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weir", "demo", f"--folder={tmp_path}", "--seconds=0.1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    decoder = next(place for place, row in enumerate(rows) if row and row[0].endswith("json/decoder.py"))
    assert rows[decoder][2:4] == ["HTTP", "python"]
    assert rows[decoder + 1][:2] == ["gRPC", "python"]
    assert any(row[:2] == ["low", "voice"] and int(row[3].removesuffix("%")) > 90 for row in rows)
    assert any(row[:1] == ["silence"] and row[2] == "0%" for row in rows)
    assert all(line in done.stdout for line in LINES)
    for model in ("file_features", "silero_vad"):
        levels = {row[1]: float(row[2]) for row in rows if row[:1] == [model]}
        assert list(levels) == ["1", "8", "32"]
        assert levels["1"] == 1.0 < levels["32"]
    killed = re.search(
        r"kill -9 of the worker \(process (\d+)\) with 8 requests to magika in flight: 0 of (\d+) failed\.", done.stdout
    )
    assert killed, done.stdout
    assert int(killed[2]) >= 8
    assert f"worker (process {killed[1]}) was killed by SIGKILL" in (tmp_path / "server.log").read_text()


def test_the_test_file_of_the_python_page(served: Served, tmp_path: Path) -> None:
    (test,) = (block.text for block in all_blocks() if (block.page, block.language) == ("docs/python.md", "py"))
    (configuration,) = (block.text for block in all_blocks() if block.language == "toml")
    (tmp_path / "models").symlink_to(served.folder / ".weir" / "demo" / "models")
    (tmp_path / "pyproject.toml").write_text(configuration)
    (tmp_path / "test_models.py").write_text(test)
    done = subprocess.run(
        # By its name alone: where Weir is installed, its entry point would name the plugin a second time.
        [sys.executable, "-m", "pytest", "-q", "-p", "weir.pytest_plugin", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**environment(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert "2 passed" in done.stdout, done.stdout

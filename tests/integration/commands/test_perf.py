"""`weir perf` against a running server: each protocol, each kind of load, and what it prints and returns."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.sequences import write_accumulator
from tests.support.models.zoo import write_add_sub, write_faulty, write_identity, write_streamer
from tests.support.servers.forked_commands import WeirProcess, run_weir
from tests.support.servers.weir_server import Server, clean_environment
from tests.support.waiting import wait_until
from weir.perf.report.document import PerfReport

SHORT = ("--measure=0.3", "--warmup=0.1", "--max-windows=1")

_numbers = count()


class Outcome:
    """A `weir perf` that has ended: its exit status and its two outputs."""

    def __init__(self, status: int, out: str, errors: str) -> None:
        self.status = status
        self.out = out
        self.errors = errors

    @property
    def report(self) -> PerfReport:
        return PerfReport.model_validate_json(self.out)


class LoadTested:
    """A server, and `weir perf` against it."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self.folder = folder

    def begin(self, *words: str, protocol: str = "http") -> tuple[WeirProcess | subprocess.Popen[bytes], Path, Path]:
        place = self.server.grpc_place if protocol == "grpc" else self.server.http_place
        url = [] if any(word.startswith("--url") for word in words) else [f"--url={place}"]
        server = [f"--protocol={protocol}", *url, f"--nats={self.server.nats_url}"]
        number = next(_numbers)
        out, errors = self.folder / f"out{number}", self.folder / f"errors{number}"
        with out.open("wb") as out_file, errors.open("wb") as errors_file:
            environment = clean_environment(self.folder)
            process = run_weir(["perf", *words, *server], environment, out_file.fileno(), errors_file.fileno())
        return process, out, errors

    def run(self, *words: str, protocol: str = "http") -> Outcome:
        process, out, errors = self.begin(*words, *SHORT, protocol=protocol)
        return Outcome(process.wait(40), out.read_text(), errors.read_text())

    def measure(self, *words: str, protocol: str = "http") -> PerfReport:
        """The report of a test in which every request was answered."""
        done = self.run(*words, "--json", protocol=protocol)
        assert done.status == 0, done.errors + done.out
        report = done.report
        for level in report.levels:
            assert level.failed == 0, level.errors
            assert level.succeeded > 0
        return report

    def statistics(self, model: str) -> dict[str, Any]:
        status, body = self.server.get(f"/v2/models/{model}/stats")
        assert status == 200
        return dict(json.loads(body)["model_stats"][0])


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadTested]:
    folder = tmp_path_factory.mktemp("perf")
    models = folder / "models"
    write_add_sub(models)
    write_identity(models, "text", "BYTES", "dynamic_batching { }")
    write_accumulator(models, "accumulator", "oldest { max_candidate_sequences: 16 }")
    write_streamer(models, "streamer", "")
    write_faulty(models)
    with Server(folder, models, "--allow-client-shm=true") as server:
        (client := folder / "client").mkdir()
        yield LoadTested(server, client)
        assert server.in_flight() == 0


@pytest.mark.parametrize("protocol", ["http", "grpc", "nats"])
def test_a_sweep_over_concurrencies(protocol: str, tested: LoadTested) -> None:
    before = tested.statistics("add_sub")["inference_count"]
    report = tested.measure("add_sub", "--concurrency=1,4", "--batch-size=2", protocol=protocol)
    assert report.server.split()[0] == "weir", "whatever --id says, which is Triton's name for its clients"
    assert (report.model, report.protocol, report.mode, report.batch_size) == ("add_sub", protocol, "concurrency", 2)
    assert report.request_bytes == 2 * 2 * 4 * 4  # two rows of two inputs of four INT32
    assert [level.concurrency for level in report.levels] == [1, 4]
    for level in report.levels:
        assert level.inferences_per_s == pytest.approx(2 * level.requests_per_s, rel=1e-3)
        assert level.requests_per_s == pytest.approx(level.succeeded / level.seconds, rel=0.01)
        assert level.latency_ms is not None
        assert 0 < level.latency_ms.p50 <= level.latency_ms.p99 <= level.latency_ms.max
        assert level.server is not None
        # What the server counted is what the client counted, but for what was in flight when either of them looked.
        assert level.server.inferences >= 2 * level.succeeded - 8
        assert level.server.batch_size >= 2
        assert level.server.compute_infer_ms > 0
        assert sum(level.server.batch_sizes.values()) == level.server.executions
    counted = tested.statistics("add_sub")["inference_count"] - before
    assert counted >= 2 * sum(level.succeeded for level in report.levels)


def test_strings_of_a_shape(tested: LoadTested) -> None:
    assert tested.measure("text", "--shape=IN:3", "--string-length=5").request_bytes == 3 * (4 + 5)


def test_a_sweep_over_rates(tested: LoadTested) -> None:
    report = tested.measure("add_sub", "--rate=40:80:40", "--arrivals=constant", protocol="nats")
    assert (report.mode, report.arrivals) == ("rate", "constant")
    assert [(level.rate, level.concurrency) for level in report.levels] == [(40, None), (80, None)]
    for level in report.levels:
        assert level.rate is not None
        assert level.succeeded > 0


@pytest.mark.parametrize(
    ("protocol", "more"),
    [("http", ()), ("grpc", ()), ("grpc", ("--streaming",)), ("nats", ()), ("http", ("--rate=50",))],
)
def test_sequences(protocol: str, more: tuple[str, ...], tested: LoadTested) -> None:
    load = more if any(word.startswith("--rate") for word in more) else (*more, "--concurrency=3")
    report = tested.measure("accumulator", "--sequence-length=4", *load, protocol=protocol)
    assert report.sequence_length == 4
    assert report.streaming == ("--streaming" in more)


@pytest.mark.parametrize("protocol", ["grpc", "nats"])
def test_times_of_the_responses_of_a_decoupled_model(protocol: str, tested: LoadTested, tmp_path: Path) -> None:
    plan = json.dumps({"responses": 3, "pause_ms": 5})
    (data := tmp_path / "data.json").write_text(json.dumps({"data": [{"PLAN": [plan]}]}))
    report = tested.measure("streamer", f"--input-data={data}", protocol=protocol)
    assert report.streaming
    (level,) = report.levels
    assert level.responses_per_s == pytest.approx(3 * level.requests_per_s, rel=0.01)
    assert level.first_response_ms is not None
    assert level.between_responses_ms is not None
    assert level.latency_ms is not None
    # The model pauses before each response. One that is late on its way is closer to the next.
    assert level.first_response_ms.p50 >= 5
    assert level.between_responses_ms.p50 > 0
    assert level.latency_ms.p50 >= 3 * 5


@pytest.mark.parametrize("protocol", ["http", "grpc", "nats"])
def test_inputs_in_shared_memory(protocol: str, tested: LoadTested) -> None:
    report = tested.measure("add_sub", "--shared-memory=system", "--concurrency=2", protocol=protocol)
    assert report.shared_memory == "system"
    with tested.server.http() as client:
        assert client.get_system_shared_memory_status() == []
    assert not list(Path("/dev/shm").glob("perf_*"))


def test_people_get_a_table_and_a_plot(tested: LoadTested) -> None:
    done = tested.run("add_sub", "--concurrency=1:4:x2")
    assert done.status == 0
    lines = done.out.splitlines()
    assert lines[0].startswith("model add_sub; http ")
    assert lines[1].split()[:4] == ["in", "flight", "req/s", "avg"]
    assert [line.split()[0] for line in lines[2:5]] == ["1", "2", "4"]
    assert "requests/s" in done.out
    assert "p99" in done.out.partition("latency ms")[0]


def test_a_plot_in_a_file(tested: LoadTested, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = tested.run("add_sub", f"--plot={tmp_path / 'plot.svg'}")
    assert done.status == 0, done.errors
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("protocol", ["http", "grpc", "nats"])
def test_errors_are_reported_by_text_and_end_the_test_with_status_1(
    protocol: str, tested: LoadTested, tmp_path: Path
) -> None:
    (data := tmp_path / "data.json").write_text('{"data": [{"WHAT": ["error"]}]}')
    done = tested.run("faulty", f"--input-data={data}", "--concurrency=1,2", "--json", protocol=protocol)
    assert done.status == 1, done.errors
    (level,) = done.report.levels  # the second one would be no news
    assert level.succeeded == 0
    assert [error.text for error in level.errors] == ["as you asked"]
    assert level.errors[0].count == level.failed > 0


def test_some_answers_are_enough_for_status_0(tested: LoadTested, tmp_path: Path) -> None:
    (data := tmp_path / "data.json").write_text('{"data": [{"WHAT": ["error"]}, {"WHAT": ["fine"]}]}')
    done = tested.run("faulty", f"--input-data={data}", "--json")
    assert done.status == 0
    (level,) = done.report.levels
    assert level.succeeded > 0 < level.failed


def test_an_interrupted_test_prints_what_was_measured(tested: LoadTested) -> None:
    before = tested.statistics("add_sub")["inference_count"]
    process, out, errors = tested.begin("add_sub", "--measure=60", "--warmup=0", "--concurrency=1:8", "--json")
    wait_until(lambda: tested.statistics("add_sub")["inference_count"] > before + 20)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130, errors.read_text()
    report = PerfReport.model_validate_json(out.read_text())
    assert report.interrupted
    (level,) = report.levels
    assert level.interrupted
    assert level.succeeded > 0
    assert 0 < level.seconds < 60


@pytest.mark.parametrize(
    ("words", "protocol", "status", "text"),
    [
        (("missing",), "http", 1, "unknown model: 'missing'"),
        (("missing",), "grpc", 1, "unknown model: 'missing'"),
        (("text",), "http", 1, "give its shape, as in --shape IN:1"),
        (("text", "--shape=OUT:1"), "http", 1, "no input 'OUT'; its inputs are IN"),
        (("add_sub", "--batch-size=9"), "grpc", 1, "may be at most 8, not 9"),
        (("add_sub", "--sequence-length=4"), "http", 1, "has no sequences"),
        (("add_sub", "--streaming"), "http", 1, "--streaming needs --protocol grpc, not http"),
        (("streamer",), "http", 1, "is decoupled"),
        (("add_sub", "--plot=plot.png"), "http", 1, "must end in .svg"),
        (("add_sub", "--input-data=missing.json"), "http", 1, "missing.json can't be read"),
        (("add_sub", "--concurrency=1", "--rate=1"), "http", 2, "exclude each other"),
        (("add_sub", "--concurrency=8:1"), "http", 2, "--concurrency: '8:1' names no levels: 1 is below 8"),
        (("add_sub", "--shape=A"), "http", 2, "--shape takes INPUT:DIMS"),
        (("add_sub", "--header=x"), "http", 2, "--header takes NAME:VALUE"),
        (("add_sub", "--url=127.0.0.1"), "http", 1, "must be host:port, not '127.0.0.1'"),
        (("add_sub", "--url=127.0.0.1:1"), "http", 1, "127.0.0.1:1 is not reachable"),
    ],
)
def test_what_cannot_begin_is_one_line(
    words: tuple[str, ...], protocol: str, status: int, text: str, tested: LoadTested
) -> None:
    process, _, errors = tested.begin(*words, *SHORT, protocol=protocol)
    assert process.wait(30) == status
    printed = errors.read_text().splitlines()
    assert len(printed) == 1, printed
    assert text in printed[0]

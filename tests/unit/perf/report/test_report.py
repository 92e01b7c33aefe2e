"""The JSON contract, the table, and the plots of a load test."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree
from pathlib import Path

import jsonschema
import pytest
from rich.console import Console

from weir.perf.clients.session import Answer
from weir.perf.load.levels import Level, Mode
from weir.perf.measurement.client_load import ClientReading
from weir.perf.measurement.distribution import Window
from weir.perf.measurement.level import LevelResult
from weir.perf.measurement.server_statistics import ServerFigures
from weir.perf.report import plot
from weir.perf.report.document import LevelReport, PerfReport
from weir.perf.report.plot import PlotUnavailable, check_svg, terminal_plot, write_svg
from weir.perf.report.table import print_report

SERVER = ServerFigures(
    inferences=120,
    executions=40,
    batches={2: 20, 4: 20},
    queue_ms=1.5,
    compute_input_ms=0.1,
    compute_infer_ms=0.7,
    compute_output_ms=0.2,
    cache_hits=0,
)
IDLE = ClientReading(loop_cpu=0.1, process_cpu=0.2, machine_cpu=0.5, lag_p90_s=0.0)


def level(value: float, latency_ms: float = 10.0, mode: Mode = Mode.CONCURRENCY, **changes: object) -> LevelResult:
    window = Window(0.0)
    for _ in range(int(value) * 10):
        window.answered(0.0, Answer((latency_ms / 2e3, latency_ms / 1e3), latency_ms / 1e3), streams=True)
    window.end(1.0)
    facts: dict[str, object] = {
        "level": Level(mode, value),
        "window": window,
        "windows": 3,
        "is_stable": True,
        "unanswered": 0,
        "server": SERVER,
        "client": IDLE,
        "client_limits": [],
    }
    return LevelResult(**{**facts, **changes})  # type: ignore[arg-type]


def failing(value: float, text: str = "no such thing") -> LevelResult:
    window = Window(0.0)
    window.failure(text, 3)
    window.end(1.0)
    return level(value, window=window, is_stable=False, server=None)


def report(*levels: LevelResult, mode: str = "concurrency", batch_size: int = 1, **changes: object) -> PerfReport:
    facts: dict[str, object] = {
        "model": "m",
        "model_version": "",
        "server": "triton 0.1.0",
        "url": "localhost:8000",
        "protocol": "http",
        "mode": mode,
        "arrivals": "poisson" if mode == "rate" else None,
        "batch_size": batch_size,
        "request_bytes": 32,
        "sequence_length": 0,
        "streaming": False,
        "shared_memory": "none",
        "interrupted": False,
        "levels": [LevelReport.of(one, batch_size) for one in levels],
    }
    return PerfReport(**{**facts, **changes})  # type: ignore[arg-type]


def printed(shown: PerfReport, width: int = 80, is_local: bool = False) -> str:
    out = io.StringIO()
    print_report(shown, Console(file=out, width=width, highlight=False, soft_wrap=True), is_local)
    return out.getvalue()


def test_the_json_object_keeps_its_fields() -> None:
    """Version 1 of the format: a field may be added, none may go."""
    document = json.loads(report(level(2), batch_size=3).model_dump_json())
    jsonschema.validate(document, PerfReport.model_json_schema())
    assert document["version"] == 1
    (one,) = document["levels"]
    durations = {"avg", "p50", "p90", "p95", "p99", "max"}
    assert document.keys() >= {
        "version", "model", "model_version", "server", "url", "protocol", "mode", "arrivals", "batch_size",
        "request_bytes", "sequence_length", "streaming", "shared_memory", "interrupted", "levels",
    }  # fmt: skip
    assert one.keys() >= {
        "concurrency", "rate", "seconds", "windows", "stable", "interrupted", "succeeded", "failed", "unanswered",
        "requests_per_s", "inferences_per_s", "responses_per_s", "latency_ms", "first_response_ms",
        "between_responses_ms", "errors", "server", "client",
    }  # fmt: skip
    assert one["latency_ms"].keys() >= durations
    assert one["first_response_ms"].keys() >= durations
    assert one["server"].keys() >= {
        "inferences", "executions", "batch_size", "batch_sizes", "queue_ms", "compute_input_ms", "compute_infer_ms",
        "compute_output_ms", "cache_hits",
    }  # fmt: skip
    assert one["client"].keys() >= {
        "is_limit", "limits", "loop_cpu", "process_cpu", "machine_cpu", "loop_lag_p90_ms", "send_delay_p99_ms",
    }  # fmt: skip


def test_the_figures_of_a_level() -> None:
    one = LevelReport.of(level(2), 3)
    assert (one.concurrency, one.rate, one.succeeded, one.failed) == (2, None, 20, 0)
    assert (one.requests_per_s, one.inferences_per_s, one.responses_per_s) == (20, 60, 40)
    assert one.latency_ms is not None
    assert one.latency_ms.p99 == pytest.approx(10, rel=0.01)
    assert one.first_response_ms is not None
    assert one.first_response_ms.p50 == pytest.approx(5, rel=0.02)
    assert one.between_responses_ms is not None
    assert one.between_responses_ms.p50 == pytest.approx(5, rel=0.02)
    assert one.server is not None
    assert (one.server.batch_size, one.server.batch_sizes) == (3, {"2": 20, "4": 20})


def test_a_level_without_answers_has_no_durations() -> None:
    one = LevelReport.of(failing(1), 1)
    assert (one.latency_ms, one.first_response_ms, one.server, one.failed) == (None, None, None, 3)
    assert [(error.text, error.count) for error in one.errors] == [("no such thing", 3)]
    assert not report(failing(1)).has_answers
    assert report(failing(1), level(1)).has_answers


def test_the_table_fits_80_columns() -> None:
    shown = printed(report(level(1, 20.0), level(64, 12_345.6), batch_size=8))
    assert max(map(len, shown.splitlines()[1:])) <= 80
    titles, first, second = shown.splitlines()[1:4]
    assert " ".join(titles.split()) == "in flight req/s rows/s avg ms p50 p90 p95 p99 failed batch queue comp."
    assert first.split() == ["1", "10.0", "80.0", *["20.0"] * 5, "0", "3.00", "1.50", "1.00"]
    assert second.split()[:3] == ["64", "640", "5120"]


def test_a_second_table_has_the_times_of_streams() -> None:
    shown = printed(report(level(1), streaming=True))
    assert "first p50 ms" in shown
    assert "between p50 ms" in shown
    assert "first p50 ms" not in printed(report(level(1)))


@pytest.mark.parametrize(
    ("levels", "mode", "text"),
    [
        ([failing(2)], "concurrency", "concurrency 2: 3 requests failed: no such thing"),
        (
            [failing(2, "request 17 is late"), failing(4, "request 4 is late")],
            "concurrency",
            "\nconcurrency 2, 4: 6 requests failed: request 17 is late\n",
        ),
        ([failing(2)], "concurrency", "concurrency 2: the server's statistics could not be read"),
        ([level(2, unanswered=4)], "concurrency", "concurrency 2: 4 requests had no answer when the level ended"),
        ([level(1, is_stable=False), level(2, is_stable=False)], "concurrency", "concurrency 1, 2: not stable"),
        (
            [level(2, client_limits=["its event loop used 97% of a processor"])],
            "concurrency",
            "2: the client did not keep up, so the server may do better: its event loop used 97% of a processor",
        ),
        (
            [level(100, mode=Mode.RATE, window=level(5).window)],
            "rate",
            "rate 100: fewer requests were answered than were due",
        ),
    ],
)
def test_notes_say_what_a_reader_should_know(levels: list[LevelResult], mode: str, text: str) -> None:
    assert text in printed(report(*levels, mode=mode), width=200)


def test_a_busy_machine_is_reported_where_client_and_server_share_it() -> None:
    busy = level(1, client=ClientReading(0.1, 0.1, 0.99, 0.0))
    text = "all processors of this machine were busy"
    assert text in printed(report(busy), is_local=True)
    assert text not in printed(report(busy), is_local=False)
    assert text not in printed(report(level(1)), is_local=True)


def test_an_interrupted_test_says_so() -> None:
    assert "the test was interrupted" in printed(report(level(1), interrupted=True))


def test_the_terminal_plot_shows_both_curves_from_zero() -> None:
    text = terminal_plot(report(level(10, 5), level(20, 8), level(40, 30)))
    assert all(label in text for label in ("p50", "p99", "requests/s", "latency ms"))
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert [line.split()[0] for line in text.splitlines() if line.strip().startswith("0")] == ["0┤", "0"]
    assert terminal_plot(report(level(10))) == ""


def test_the_svg_names_each_level(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    check_svg(tmp_path / "plot.svg")
    write_svg(report(level(10, 5), level(20, 8)), tmp_path / "plot.svg")
    root = xml.etree.ElementTree.parse(tmp_path / "plot.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_a_plot_that_could_not_be_written_is_rejected_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlotUnavailable, match=r"must end in \.svg, not 'a\.png'"):
        check_svg(tmp_path / "a.png")
    with pytest.raises(PlotUnavailable, match="is not a folder you may write to"):
        check_svg(tmp_path / "missing" / "a.svg")
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(PlotUnavailable, match=r"needs matplotlib.*pip install matplotlib"):
        check_svg(tmp_path / "a.svg")

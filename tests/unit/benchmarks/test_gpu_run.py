"""The run of the GPU benchmarks: its rehearsal on a CPU, the page that it writes, and how it goes on where it stopped."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import check
from benchmarks.gpu.overlap import Span, _common, _length, picture, row_of
from benchmarks.gpu.plan import Plan, rehearsal
from benchmarks.gpu.report import Results, Section


def a_section(name: str, rows: int = 1) -> Section:
    section = Section(name, f"About {name}", "What it shows.", ("what", "how much"))
    for number in range(rows):
        section.add(f"row {number}", 1.5)
    return section


def test_the_page_has_every_section_in_order(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.keep(a_section("second"))
    first = a_section("first", 2)
    first.note("One thing is to know.")
    first.pictures.append("a.svg")
    results.keep(first)
    page = Results(tmp_path).write(["first", "second", "third"], "a machine", "2026-01-01").read_text()
    assert page.startswith("# Runs: GPUs\n\nWritten by `make gpu-check` on a machine, 2026-01-01.")
    assert (
        "\n## About first\n\nWhat it shows.\n\n| what | how much |\n|---|---|\n| row 0 | 1.50 |\n| row 1 | 1.50 |\n"
        in page
    )
    assert "![About first](../pictures/a.svg)\n\nOne thing is to know.\n" in page
    assert page.index("## About first") < page.index("## About second")
    assert page.endswith("Not measured in this run: third.\n")
    with pytest.raises(ValueError, match="section 'first': 1 cells for 2 columns"):
        first.add("alone")


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def section(name: str) -> object:
        def measure(plan: Plan) -> Section:
            measured.append(name)
            if name == "broken":
                raise RuntimeError("no such thing")
            return a_section(name)

        return measure

    monkeypatch.setattr(gpu, "SECTIONS", {name: section(name) for name in ("one", "broken", "two")})
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    (tmp_path / "out").mkdir()
    plan = rehearsal(tmp_path / "run")
    names = ["one", "broken", "two"]
    assert gpu.run(replace(plan, deadline_s=time.monotonic() - 1), names, again=False) == 0
    assert measured == []
    assert gpu.run(plan, names, again=False) == 1
    assert measured == names
    assert gpu.run(plan, names, again=False) == 1
    assert measured[3:] == ["broken"]
    assert gpu.run(plan, ["one"], again=True) == 0
    assert measured[4:] == ["one"]
    page = (tmp_path / "out" / "gpu.md").read_text()
    assert "## About one" in page
    assert "Not measured in this run: broken." in page


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("Memcpy HtoD (Pinned -> Device)", "copy in"),
        ("Memcpy DtoH (Device -> Pageable)", "copy out"),
        ("Memcpy DtoD (Device -> Device)", "compute"),
        ("sm90_xmma_fprop_implicit_gemm_f32f32", "compute"),
    ],
)
def test_events_of_a_trace_are_classified(name: str, row: str) -> None:
    assert row_of(name) == row


def test_overlap_is_the_time_in_which_both_run() -> None:
    kernels = [Span("compute", 0, 10), Span("compute", 5, 20), Span("compute", 30, 40)]
    copies = [Span("copy in", 15, 35), Span("copy out", 50, 60)]
    assert (_length(kernels), _length(copies)) == (30, 30)
    assert _common(copies, kernels) == 10
    drawn = picture([*kernels, *copies])
    assert drawn.count("<rect") == 1 + 2 + 1 + 1
    assert drawn.rstrip().endswith("</svg>")


def test_the_files_of_the_gpu_tests_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    flows = "tests/compat/examples/test_region_flows.py"
    for archives in ([Path("server.tar.xz")], []):
        monkeypatch.setattr(check, "ARCHIVES", archives)
        found = check.gpu_tests()
        assert (flows in found) == (not archives)
    assert found[:3] == ["-m", "gpu", "-rs"]
    assert "tests/unit/worker/cuda/test_device_instance_gpu.py" in found
    assert "tests/unit/worker/devices/test_gpus.py" in found
    assert all((check.ROOT / path).is_file() for path in found[3:])


def test_archives_are_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module.py").write_text("word = 1\n")
    with tarfile.open(tmp_path / "a.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "module.py", "module.py")
    monkeypatch.setattr(check, "ARCHIVES", [tmp_path / "a.tar.xz"])
    site = tmp_path / "site"
    site.mkdir()
    check.unpack(site)
    (site / "module.py").write_text("word = 2\n")
    check.unpack(site)
    assert (site / "module.py").read_text() == "word = 2\n"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_check_is_rehearsed_on_a_cpu(tmp_path: Path) -> None:
    """One command, through the code of the real run: the tests, every section, the page."""
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "benchmarks.gpu.check", "--device", "cpu", "--folder", str(tmp_path)]
    ended = subprocess.run(command, cwd=check.ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    for name in gpu.SECTIONS:
        rows = json.loads((tmp_path / "results" / f"{name}.json").read_text())["rows"]
        assert rows, name
    assert "Not measured" not in (tmp_path / "results" / "gpu.md").read_text()
    assert (tmp_path / "tests-passed-cpu").exists()

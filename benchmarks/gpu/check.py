"""Runs everything that needs a GPU: the tests marked `gpu`, then the benchmark.

    python3 -m benchmarks.gpu.check [--tests] [--figures] [--minutes 9] [--site FOLDER] [--device cpu]

With archives of `benchmarks.gpu.bundle` it uses the running Python and unpacks them; without them it uses the
environment of `make install`. `--site` names a folder that keeps the unpacked packages for the next run, for machines
that can't receive both archives at once. pytest lists what is skipped.

It begins nothing after `--minutes`. What it has done is kept in `.bench/gpu`, so the same command goes on where it stopped:
tests that have passed do not run again, and the benchmark measures the sections that it lacks. `--device cpu` rehearses all
that on a machine without a GPU, with the tests on the fake GPU in place of those on a real one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from weir.runtime.archives import unpack_tar

ROOT = Path(__file__).parents[2]
ARCHIVES = sorted((ROOT / ".gpu-bundle").glob("*.tar.xz"))


def environment(site: Path) -> dict[str, str]:
    """Variables with which a program finds what was unpacked, in all of its processes."""
    paths = [str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join([str(site / "bin"), os.environ.get("PATH", os.defpath)]),
    }


NEEDED = """
import importlib.util, sys
from weir.worker.devices.gpus import find_gpus

def lacks(name):
    try:
        return importlib.util.find_spec(name) is None
    except ImportError:
        return True

gpus = find_gpus()
missing = [] if gpus.gpus else [f"a GPU: {gpus.problem}"]
missing += [f"the package {name}" for name in ("cuda.bindings", "numpy", "pytest") if lacks(name)]
for gpu in gpus.gpus:
    print(f"GPU {gpu.ordinal}: {gpu.name}, compute capability {'.'.join(map(str, gpu.compute_capability))}")
for name in filter(lacks, ("onnxruntime", "torch", "tritonclient")):
    print(f"no {name}: what needs it is left out, or fails")
sys.stdout.flush()
sys.exit("the GPU check needs " + "; ".join(missing) if missing else 0)
"""
"""A program that says what is missing, before anything that takes long."""


FOLDER = ROOT / ".bench" / "gpu"


def unpack(site: Path) -> None:
    """Unpacks the archives into `site`, each once."""
    for file in ARCHIVES:
        done = site / f".{file.name}-{file.stat().st_size}"
        if not done.exists():
            unpack_tar(file, site)
            done.touch()


def gpu_tests() -> list[str]:
    """The arguments for the tests that need a GPU: of their files alone, as others import packages that are not carried.

    Tests with Triton's HTTP client are left out where packages are carried, because that client's are not.
    """
    folders = [ROOT / "tests/unit"] if ARCHIVES else [ROOT / "tests/compat", ROOT / "tests/unit"]
    files = [path for folder in folders for path in sorted(folder.rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    own = [str(path.relative_to(ROOT)) for path in files if "benchmarks" not in path.parts]
    return ["-m", "gpu", "-rs", *own]


REHEARSED_TESTS = ["-m", "not slow and not gpu", "tests/unit/worker/cuda"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is asked for, by default everything; the status is that of what failed first, 2 for want of something."""
    options = argparse.ArgumentParser()
    options.add_argument("--tests", action="store_true", help="the tests alone")
    options.add_argument("--figures", action="store_true", help="the figures alone")
    options.add_argument("--minutes", type=float, default=9.0, help="begin nothing after so many minutes")
    options.add_argument("--site", type=Path, help="folder for what is unpacked, which is kept")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: rehearse without a GPU")
    options.add_argument("--folder", type=Path, default=FOLDER, help="for results, which are kept")
    options.add_argument("further", nargs="*", help="options of benchmarks.gpu, after --")
    chosen = options.parse_args(arguments)
    began_s = time.monotonic()
    everything = chosen.tests == chosen.figures
    status = 0
    with tempfile.TemporaryDirectory() as scratch:
        site = (chosen.site or Path(scratch)).resolve()
        site.mkdir(parents=True, exist_ok=True)
        unpack(site)
        variables = environment(site)
        if chosen.device == "cuda" and _run([sys.executable, "-c", NEEDED], variables):
            return 2
        chosen.folder.mkdir(parents=True, exist_ok=True)
        passed = chosen.folder / f"tests-passed-{chosen.device}"
        if chosen.tests or (everything and not passed.exists()):
            tests = gpu_tests() if chosen.device == "cuda" else REHEARSED_TESTS
            status = _run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests], variables)
            if not status:
                passed.touch()
        if everything or chosen.figures:
            minutes = chosen.minutes - (time.monotonic() - began_s) / 60
            places = ["--device", chosen.device, "--folder", str(chosen.folder), "--minutes", f"{minutes:.2f}"]
            # Figures are worth having whatever a test has found.
            status = _run([sys.executable, "-m", "benchmarks.gpu", *places, *chosen.further], variables) or status
    return status


def _run(command: Sequence[str], variables: dict[str, str]) -> int:
    return subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

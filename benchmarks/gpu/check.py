"""Runs everything that needs a GPU: the tests marked `gpu`, then the benchmark.

    python3 -m benchmarks.gpu.check [--tests] [--figures] [--seconds N] [--site FOLDER]

With archives of `benchmarks.gpu.bundle` it uses the running Python and unpacks them; without them it uses the
environment of `make install`. `--site` names a folder that keeps the unpacked packages for the next run, for machines
that can't receive both archives at once. pytest lists what is skipped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

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
from worker.devices.gpus import find_gpus

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


def main() -> int:
    """Runs what is asked for, by default everything; the status is that of what failed first, 2 for want of something."""
    options = argparse.ArgumentParser()
    options.add_argument("--tests", action="store_true", help="the tests alone")
    options.add_argument("--figures", action="store_true", help="the figures alone")
    options.add_argument("--seconds", type=float, default=3.0, help="length of one measurement")
    options.add_argument("--site", type=Path, help="folder for what is unpacked, which is kept")
    chosen = options.parse_args()
    everything = chosen.tests == chosen.figures
    status = 0
    with tempfile.TemporaryDirectory() as scratch:
        site = chosen.site or Path(scratch)
        site.mkdir(parents=True, exist_ok=True)
        for file in ARCHIVES:
            with tarfile.open(file) as archive:
                archive.extractall(site, filter="data")
        variables = environment(site)
        if subprocess.run([sys.executable, "-c", NEEDED], cwd=ROOT, env=variables, check=False).returncode:
            return 2
        if everything or chosen.tests:
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-m",
                "gpu",
                "-p",
                "no:cacheprovider",
                "-rs",
                "tests/unit/worker",
            ]
            status = subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode
        if everything or chosen.figures:
            command = [sys.executable, "-m", "benchmarks.gpu", "--seconds", str(chosen.seconds)]
            status = status or subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode
    return status


if __name__ == "__main__":
    sys.exit(main())

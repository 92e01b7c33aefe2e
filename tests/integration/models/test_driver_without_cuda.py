"""A machine with a driver and a GPU, on which only the packages for CPUs are installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.docs.pages import ROOT
from weir.worker.backends.onnxruntime.session import NO_CUDA
from weir.worker.devices.gpus import has_cuda_bindings

FAKE_DRIVER = ROOT / "tests" / "support" / "fakes" / "gpu_driver"


def test_the_whole_demo_runs_on_the_cpu_and_the_log_has_the_reason(tmp_path: Path) -> None:
    assert not has_cuda_bindings()
    path = os.pathsep.join(filter(None, [str(FAKE_DRIVER), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "weir", "demo", f"--folder={tmp_path}", "--seconds=0.1"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    logs = "".join(file.read_text(errors="replace") for file in tmp_path.rglob("*log*") if file.is_file())
    printed = done.stderr + logs
    assert done.returncode == 0, printed
    assert "GPUs: 0 fake" in printed
    reasons = re.findall(r"model '(\w+)': its instances without a kind run on the CPU, because ([^\"]*)", printed)
    reason = f"backend 'onnxruntime' can't use this machine's GPUs: KIND_GPU: {NO_CUDA}"
    assert ("magika", reason) in reasons, printed

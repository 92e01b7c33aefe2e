"""A machine with a driver and a GPU, on which only the packages for CPUs are installed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from tests.support.clients.stock import http_inputs
from tests.support.docs.pages import ROOT
from tests.support.models.zoo import write_versions
from tests.support.servers.weir_server import Server
from weir.worker.backends.onnxruntime.session import NO_CUDA
from weir.worker.devices.gpus import has_cuda_bindings

FAKE_DRIVER = ROOT / "tests" / "support" / "fakes" / "gpu_driver"


def test_models_run_on_the_cpu_and_the_log_has_the_reason(tmp_path: Path) -> None:
    assert not has_cuda_bindings()
    write_versions(tmp_path / "models", "adds", "")
    path = os.pathsep.join(filter(None, [str(FAKE_DRIVER), os.environ.get("PYTHONPATH", "")]))
    with Server(tmp_path, tmp_path / "models", environment={"PYTHONPATH": path}) as server:
        with server.http() as client:
            reply = client.infer("adds", http_inputs({"IN": np.array([1], np.float32)}))
        assert reply.as_numpy("OUT").tolist() == [4]
    assert "GPUs: 0 fake" in server.log()
    reason = f"backend 'onnxruntime' can't use this machine's GPUs: KIND_GPU: {NO_CUDA}"
    assert f"model 'adds': its instances without a kind run on the CPU, because {reason}" in server.log()

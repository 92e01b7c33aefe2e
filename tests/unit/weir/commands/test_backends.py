"""`weir backends` on a machine without a GPU and on one with fake GPUs."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from weir.commands.app import main
from weir.commands.backends import as_json, as_text
from weir.commands.doctor.backend_rows import backend_rows
from weir.worker.backends.registry import BACKENDS, BackendRegistry
from weir.worker.devices.gpus import Gpu, HostGpus

NO_DRIVER = HostGpus(problem="no NVIDIA driver: libcuda.so.1 was not found")
TWO = HostGpus(tuple(Gpu(n, f"GPU-{n}", "Testing GPU", 80 << 30, (9, 0)) for n in (0, 1)))


def test_the_table_of_a_machine_without_a_gpu() -> None:
    text = as_text(list(backend_rows(BackendRegistry(), NO_DRIVER)), NO_DRIVER, is_terminal=False)
    title, *lines = text.splitlines()
    assert title.split("  ")[0] == "backend"
    rows = {line.split()[0]: line for line in lines if line}
    assert rows.keys() >= {*BACKENDS, "no"}
    assert rows["onnxruntime"].split()[1:4] == [metadata.version("onnxruntime"), "CPU", "model.onnx"]
    assert "GPU" in rows["onnxruntime"].partition("model.onnx")[2]
    assert rows["python"].endswith("not on GPUs: no NVIDIA driver: libcuda.so.1 was not found")
    assert "nothing" in rows["tensorrt"]
    assert lines[-1] == "no GPUs: no NVIDIA driver: libcuda.so.1 was not found"
    assert "\x1b" not in text


def test_the_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.worker.backends.python.backend.cuda_obstacle", lambda: "")
    rows = {row.name: row for row in backend_rows(BackendRegistry(), TWO)}
    assert (rows["python"].cpu, rows["python"].gpus, rows["python"].problems) == (True, [0, 1], [])
    lines = as_text(list(rows.values()), TWO, is_terminal=False).splitlines()
    assert lines[-2:] == [f"GPU {n}: Testing GPU, 80 GiB, compute capability 9.0, GPU-{n}" for n in (0, 1)]
    assert any("CPU, GPU 0, GPU 1" in line for line in lines)


def test_for_machines_and_with_one_s_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "based").mkdir()
    (tmp_path / "based" / "model.py").write_text("raise OSError('only its own process imports it')")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "backend.py").write_text("import nowhere")
    with pytest.raises(SystemExit) as ended:
        main(["backends", "--json", "--backend-directory", str(tmp_path)])
    assert ended.value.code == 0
    reply = json.loads(capsys.readouterr().out)
    assert reply.keys() == {"backends", "gpus", "gpus_problem"}
    rows = {row["name"]: row for row in reply["backends"]}
    assert list(rows) == [*BACKENDS, "based", "broken"]
    assert rows["based"]["cpu"]
    assert rows["based"]["file"] == str(tmp_path / "based" / "model.py")
    assert not rows["broken"]["cpu"]
    assert "No module named 'nowhere'" in rows["broken"]["problems"][0]


def test_a_backend_directory_must_be_there(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["backends"], ["serve", "--model-repository=."]):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--backend-directory=nowhere"])
        assert ended.value.code == 1
        assert capsys.readouterr().err == "error: backend directory nowhere is not a folder\n"


def test_a_terminal_gets_a_table_that_fits_and_json_has_every_field() -> None:
    rows = list(backend_rows(BackendRegistry(), TWO))
    assert "─" in as_text(rows, TWO, is_terminal=True)
    reply = json.loads(as_json(rows, TWO))
    assert reply["gpus"][1] == {
        "ordinal": 1,
        "uuid": "GPU-1",
        "name": "Testing GPU",
        "memory_bytes": 80 << 30,
        "compute_capability": [9, 0],
    }

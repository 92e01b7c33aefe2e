"""Packages of AOTInductor, compiled by the tests because they are bound to a machine's instructions."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from tests.support.models.torch_files import config, instance_of, request, run, version, without_warnings
from tests.support.own_process import later
from weir.repository.config_text import config_from_dict, config_to_json
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.worker.backend_api.interface import InstanceDevice
from weir.worker.backends.isolation.backend import IsolatedBackend, isolate_if_wanted
from weir.worker.backends.pytorch.backend import PyTorchBackend
from weir.worker.backends.pytorch.programs import Format, find_artifact

torch = later("torch")
networks = later("tests.support.models.torch_networks")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "1").mkdir()
    batch = torch.export.Dim("batch", min=1, max=16)
    # Of one tensor given twice torch makes one input.
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    program = torch.export.export(networks.Two(), (x,), {"y": y}, dynamic_shapes={"x": {0: batch}, "y": {0: batch}})
    with without_warnings():
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "1" / "model.pt2"))
    return folder


def made(count: int = 1, **fields: object) -> ModelConfig:
    group = [{"kind": "KIND_CPU", "count": count}]
    return config(
        inputs="first:FP32:-1 y:FP32:-1",
        outputs="sum:FP32:1 less:FP32:3",
        max_batch_size=32,
        instance_group=group,
        **fields,
    )


def rows(count: int, start: int = 0) -> np.ndarray:
    return np.arange(count * 3, dtype=np.float32).reshape(count, 3) + start


def test_a_package_is_detected_by_content_and_responds_by_name(package: Path) -> None:
    model = version(package, made())
    assert find_artifact(model).format is Format.COMPILED
    with instance_of(model) as instance:
        first, second = run(instance, request(first=rows(1), y=rows(1, 1)), request(y=rows(2, 5), first=rows(2)))
    assert first["less"].tolist() == [[-1, -1, -1]]
    np.testing.assert_array_equal(second["sum"], (2 * rows(2) + 5).sum(1, keepdims=True))


def test_inputs_of_other_shapes_are_refused_and_never_read_past_their_end(package: Path) -> None:
    with instance_of(version(package, made())) as instance:
        for x, y in ((rows(17), rows(17)), (rows(2), rows(2)[:, :2]), (rows(2).T.copy(), rows(2).T.copy())):
            with pytest.raises(WeirError, match=r"the model rejects its inputs: input_handles\[") as raised:
                run(instance, request(first=x, y=y))
            assert raised.value.code is ErrorCode.INVALID_ARG


def test_several_instances_run_concurrently_in_threads_or_processes(package: Path) -> None:
    backend = PyTorchBackend()
    assert isolate_if_wanted(backend, version(package, made())) is backend
    several = version(package, made(count=2))
    isolated = isolate_if_wanted(backend, several)
    assert isinstance(isolated, IsolatedBackend)
    with instance_of(several, backend=isolated) as instance:
        assert run(instance, request(first=rows(1), y=rows(1)))[0]["less"].tolist() == [[0, 0, 0]]
    in_threads = version(package, made(count=2, parameters={"isolation": "thread"}))
    assert isolate_if_wanted(backend, in_threads) is backend
    loaded = backend.load(in_threads)
    wrong: list[int] = []

    def work(number: int) -> None:
        instance = loaded.create_instance(InstanceDevice("KIND_CPU", 0, f"m_{number}"))
        for n in range(50):
            if not (run(instance, request(first=rows(4, n), y=rows(4)))[0]["less"] == n).all():
                wrong.append(n)
        instance.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert config_from_dict(config_to_json(in_threads.config)) == in_threads.config


def test_a_package_runs_only_on_its_kind_of_device(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with (
        pytest.raises(WeirError, match="compiled for cpu, so it can't run on cuda"),
        instance_of(version(package, made()), "KIND_GPU"),
    ):
        pass

"""`ModelLoader`: from a repository's folders to loaded versions."""

import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from weir.repository.layout import FoundModel, ModelRepository
from weir.schemas.config.model_config import InstanceGroup, ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor
from weir.schemas.wire.batches import BatchEntry, BatchMessage
from weir.schemas.wire.calls import unpack_responses
from weir.schemas.wire.registry import UNLOADED, ModelState, VersionRecord
from weir.schemas.wire.request_body import pack_body
from weir.worker.devices.gpus import WorkerDevices
from weir.worker.execution.batch import Batch
from weir.worker.execution.instance import ModelEnvironment
from weir.worker.execution.updates import BatchUpdate
from weir.worker.lifecycle.instance_plan import planned_instances
from weir.worker.lifecycle.loader import LoadPolicy, LoadResult, ModelLoader, check_supported

Finished = queue.SimpleQueue[BatchUpdate]

CONFIG = """
name: "{name}"
backend: "onnxruntime"
max_batch_size: 4
input {{ name: "IN" data_type: TYPE_FP32 dims: [-1] }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: [-1] {output} }}
instance_group [{{ count: 2 kind: KIND_CPU }}]
{more}
"""


def write_model(root: Path, name: str, versions: tuple[int, ...] = (1,), output: str = "", more: str = "") -> Path:
    folder = root / name
    folder.mkdir()
    (folder / "config.pbtxt").write_text(CONFIG.format(name=name, output=output, more=more))
    graph = helper.make_graph(
        [helper.make_node("Neg", ["IN"], ["OUT"])],
        "graph",
        [helper.make_tensor_value_info("IN", TensorProto.FLOAT, ["batch", "width"])],
        [helper.make_tensor_value_info("OUT", TensorProto.FLOAT, ["batch", "width"])],
    )
    for version in versions:
        (folder / str(version)).mkdir()
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.save(model, folder / str(version) / "model.onnx")
    return folder


def environment(on_update: Callable[[BatchUpdate], None] = lambda finished: None) -> ModelEnvironment:
    return ModelEnvironment(arena_prefix="worker-test", on_update=on_update)


class Loading:
    """A loader of the repository `root`, which unloads everything at the end."""

    def __init__(self, root: Path) -> None:
        self.finished: Finished = queue.SimpleQueue()
        self._loader = ModelLoader(ModelRepository([root]), environment(self.finished.put))
        self._loaded: list[LoadResult] = []

    def load(self, name: str, serving: LoadResult | None = None) -> LoadResult:
        self._loaded.append(self._loader.load(self._loader.look().models[name], serving=serving))
        for served in self._loaded[-1].served.values():
            served.take_over()
        return self._loaded[-1]

    def close(self) -> None:
        for served in {served for result in self._loaded for served in result.served.values()}:
            served.unload()


@pytest.fixture
def loading(tmp_path: Path) -> Iterator[Loading]:
    opened = Loading(tmp_path)
    yield opened
    opened.close()


def test_every_instance_of_a_loaded_version_runs_batches(loading: Loading, tmp_path: Path) -> None:
    write_model(tmp_path, "neg")
    result = loading.load("neg")
    assert result.reason == ""
    assert (result.records[1].state, result.records[1].instances) == (ModelState.READY, 2)
    array = np.ones((1, 3), np.float32)
    body = pack_body(InferRequest("neg", inputs=[Tensor.from_numpy("IN", array, "FP32")]))
    for number, instance in enumerate(result.served[1].instances):
        entries = [BatchEntry("gateway-x", 7, 0, body), BatchEntry("gateway-y", 8, 0, body)]
        instance.submit(Batch(BatchMessage("scheduler-x", number, "neg", 1, number, entries)))
        finished = loading.finished.get(timeout=10)
        assert [end.batch_id for end in finished.completions] == [number]
        for (gateway, message), key in zip(finished.responses, (7, 8), strict=True):
            version, (answer,) = unpack_responses(message)
            assert (gateway, version, answer.key) == (f"gateway-{'xy'[key - 7]}", 1, key)
            np.testing.assert_array_equal(answer.outputs[0].to_numpy(), -array)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("", [3]),
        ("version_policy { latest { num_versions: 2 } }", [2, 3]),
        ("version_policy { all { } }", [1, 2, 3]),
        ("version_policy { specific { versions: [1, 3] } }", [1, 3]),
    ],
)
def test_the_version_policy_selects_versions(
    loading: Loading, tmp_path: Path, policy: str, expected: list[int]
) -> None:
    write_model(tmp_path, "neg", (1, 2, 3), more=policy)
    result = loading.load("neg")
    assert sorted(result.served) == sorted(result.records) == expected


def test_a_broken_version_fails_the_whole_model_as_in_triton(loading: Loading, tmp_path: Path) -> None:
    folder = write_model(tmp_path, "neg", (1, 2), more="version_policy { all { } }")
    (folder / "2" / "model.onnx").write_bytes(b"not a model")
    result = loading.load("neg")
    assert result.served == {}
    assert result.records[1] == VersionRecord(ModelState.UNAVAILABLE, UNLOADED)
    assert result.records[2].state == ModelState.UNAVAILABLE
    assert result.records[2].reason.startswith("Internal: onnx runtime error: ")
    assert str(tmp_path) not in result.records[2].reason
    assert result.error is not None
    told = f"version 2 is at UNAVAILABLE state: {result.records[2].reason};\n"
    assert result.error.message == f"load failed for model 'neg': {told}"


def test_a_reload_reuses_unchanged_versions(loading: Loading, tmp_path: Path) -> None:
    folder = write_model(tmp_path, "neg", (1, 2), more="version_policy { all { } }")
    first = loading.load("neg")
    os.utime(folder / "2" / "model.onnx", (1, 1))
    (folder / "config.pbtxt").write_text((folder / "config.pbtxt").read_text() + "\n# a comment")
    second = loading.load("neg", first)
    assert second.served[1] is first.served[1]
    assert second.served[2] is not first.served[2]
    instance = first.served[1].instances[0]
    (folder / "config.pbtxt").write_text((folder / "config.pbtxt").read_text().replace("count: 2", "count: 1"))
    third = loading.load("neg", second)
    assert third.served[1] is not first.served[1]
    assert third.served[1].instances == [instance], "the first one goes on"
    assert len(first.served[1].instances) == 1, "the other one ends"
    (folder / "2" / "model.onnx").write_bytes(b"not a model")
    loading.load("neg", third)
    assert len(third.served[1].instances) == 1, "what serves was left alone"


def test_another_version_policy_alone_reloads_no_version(loading: Loading, tmp_path: Path) -> None:
    folder = write_model(tmp_path, "neg", (1, 2), more="version_policy { specific { versions: [1] } }")
    first = loading.load("neg")
    (folder / "config.pbtxt").write_text((folder / "config.pbtxt").read_text().replace("[1]", "[1, 2]"))
    second = loading.load("neg", first)
    assert sorted(second.served) == [1, 2]
    assert second.served[1] is first.served[1]
    instances = list(first.served[1].instances)
    policy_and_groups = (folder / "config.pbtxt").read_text().replace("[1, 2]", "[1]").replace("count: 2", "count: 3")
    (folder / "config.pbtxt").write_text(policy_and_groups)
    third = loading.load("neg", second)
    assert sorted(third.served) == [1]
    assert third.served[1].instances[:2] == instances, "instances that are still wanted go on"
    assert third.config is not None
    assert third.config.version_policy is not None
    assert third.config.version_policy.specific is not None
    assert third.config.version_policy.specific.versions == [1]


def test_a_load_is_retried_as_often_as_configured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_model(tmp_path, "neg")
    (folder / "1" / "model.onnx").write_bytes(b"not a model")
    loader = ModelLoader(ModelRepository([tmp_path]), environment(), policy=LoadPolicy(auto_complete=False, retries=2))
    assert loader.load(loader.look().models["neg"]).served == {}
    assert sum("loading 'neg' version 1 again" in line for line in caplog.messages) == 2


def test_without_completion_a_model_needs_a_configuration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = write_model(tmp_path, "neg") / "config.pbtxt"
    override = ModelConfig(backend="onnxruntime").model_dump_json(exclude_defaults=True)
    config.unlink()
    loader = ModelLoader(ModelRepository([tmp_path]), environment(), policy=LoadPolicy(auto_complete=False))
    result = loader.load(loader.look().models["neg"])
    assert result.served == {}
    missing = "failed to open text file for read neg/config.pbtxt: No such file or directory"
    assert result.reason == f"Internal: {missing}"
    assert f"Poll failed for model directory 'neg': {missing}" in caplog.messages
    assert result.error is not None
    assert result.error.message == f"failed to load 'neg', failed to poll from model repository: {missing}"
    sent = loader.load(loader.look().models["neg"], override)
    assert "failed to open" not in sent.reason
    for served in sent.served.values():
        served.unload()
    completing = ModelLoader(ModelRepository([tmp_path]), environment()).load(loader.look().models["neg"])
    assert sorted(completing.served) == [1]
    completing.served[1].unload()


def test_a_folder_of_too_many_files_is_rejected(
    loading: Loading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weir.repository.layout.MAX_FILES", 2)
    folder = write_model(tmp_path, "neg")
    (folder / "1").rename(tmp_path.parent / "elsewhere")
    (folder / "1").symlink_to(tmp_path.parent)
    result = loading.load("neg")
    assert result.reason.endswith("version 1 of model 'neg' has more than 2 files")
    assert not result.served


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            ("onnxruntime", "tensorflow"),
            "Invalid argument: unable to find backend library for backend 'tensorflow', try specifying runtime on",
        ),
        (('name: "OUT"', 'name: "X"'), "X"),
        (("KIND_CPU", "KIND_GPU"), "GPU"),
        (("max_batch_size: 4", "max_batch_size: four"), "neg/config.pbtxt:4"),
    ],
)
def test_a_failed_load_has_a_reason(loading: Loading, tmp_path: Path, change: tuple[str, str], reason: str) -> None:
    folder = write_model(tmp_path, "neg")
    text = (folder / "config.pbtxt").read_text()
    (folder / "config.pbtxt").write_text(text.replace(*change))
    result = loading.load("neg")
    assert result.served == {}
    assert reason in result.reason + "".join(record.reason for record in result.records.values())


def test_a_file_that_can_not_be_read_is_named_without_its_path(
    loading: Loading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, "neg")

    def refuse(found: FoundModel, config: ModelConfig) -> dict[str, list[str]]:
        raise PermissionError(13, "Permission denied", str(folder / "1" / "model.onnx"))

    monkeypatch.setattr("weir.worker.lifecycle.loader.read_output_labels", refuse)
    assert loading.load("neg").records[1].reason == "Internal: failed to read 'model.onnx': Permission denied"


def test_label_files_are_read(loading: Loading, tmp_path: Path) -> None:
    folder = write_model(tmp_path, "neg", output='label_filename: "labels.txt"')
    (folder / "labels.txt").write_text("cat\ndog\n")
    assert loading.load("neg").labels == {"OUT": ["cat", "dog"]}


def test_a_missing_label_file_fails_the_load(loading: Loading, tmp_path: Path) -> None:
    write_model(tmp_path, "neg", output='label_filename: "labels.txt"')
    result = loading.load("neg")
    assert result.served == {}
    assert "labels.txt" in result.records[1].reason


def test_instances_are_named_and_placed_as_in_triton() -> None:
    groups = [
        InstanceGroup(name="cpu", kind="KIND_CPU", count=2),
        InstanceGroup(name="gpu", kind="KIND_GPU", count=2, gpus=[0, 1, 2]),
        InstanceGroup(name="idle", kind="KIND_CPU", count=3, passive=True),
    ]
    plan = planned_instances(ModelConfig(name="m", instance_group=groups), WorkerDevices((0, 1, 2), (0, 2)))
    assert [(device.kind, device.device_id, device.name, group.passive) for device, group in plan] == [
        ("KIND_CPU", 0, "cpu_0", False),
        ("KIND_CPU", 0, "cpu_1", False),
        ("KIND_GPU", 0, "gpu_0", False),
        ("KIND_GPU", 2, "gpu_0", False),
        ("KIND_GPU", 0, "gpu_1", False),
        ("KIND_GPU", 2, "gpu_1", False),
        *[("KIND_CPU", 0, f"idle_{number}", True) for number in range(3)],
    ]


def test_passive_instances_are_created_but_not_published(loading: Loading, tmp_path: Path) -> None:
    write_model(tmp_path, "neg", more="instance_group [{ count: 3 kind: KIND_CPU passive: true }]")
    result = loading.load("neg")
    assert result.reason == ""
    assert result.records[1].instances == len(result.served[1].instances) == 2
    names = {thread.name for thread in threading.enumerate()}
    assert {"neg_0_0", "neg_0_1", "neg_1_0", "neg_1_1", "neg_1_2"} <= names


def test_only_python_models_may_be_decoupled() -> None:
    config = {"name": "m", "model_transaction_policy": {"decoupled": True}}
    check_supported(ModelConfig.model_validate({**config, "backend": "python"}))
    with pytest.raises(WeirError, match="model 'm' can't be decoupled") as refused:
        check_supported(ModelConfig.model_validate({**config, "backend": "onnxruntime"}))
    assert refused.value.code is ErrorCode.UNSUPPORTED


@pytest.mark.parametrize(
    ("groups", "devices", "is_elsewhere"),
    [
        ("[{ kind: KIND_GPU }]", WorkerDevices(), True),
        ("[{ kind: KIND_GPU gpus: [1] }]", WorkerDevices((0, 1), (0,)), True),
        ("[{ kind: KIND_CPU }]", WorkerDevices((0,), (0,), has_cpu=False), True),
        ("[{ kind: KIND_GPU }, { kind: KIND_CPU }]", WorkerDevices(), False),
        ("[{ kind: KIND_CPU gpus: [0] }]", WorkerDevices(), False),
    ],
)
def test_a_model_for_devices_of_other_workers_is_not_a_failure(
    tmp_path: Path, groups: str, devices: WorkerDevices, is_elsewhere: bool
) -> None:
    folder = write_model(tmp_path, "m")
    config = (folder / "config.pbtxt").read_text().replace("[{ count: 2 kind: KIND_CPU }]", groups)
    (folder / "config.pbtxt").write_text(config)
    loader = ModelLoader(ModelRepository([tmp_path]), replace(environment(), devices=devices))
    result = loader.load(ModelRepository([tmp_path]).find("m"))
    assert result.elsewhere == is_elsewhere
    assert result.error is not None
    assert "instance group m_0 of model m" in result.records[1].reason

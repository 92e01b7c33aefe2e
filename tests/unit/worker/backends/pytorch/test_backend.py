"""PyTorch models on the CPU: their formats, names, outputs and errors."""

from __future__ import annotations

import mmap
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.support.models.torch_files import (
    config,
    export,
    instance_of,
    request,
    run,
    script,
    version,
    without_warnings,
)
from tests.support.own_process import later
from weir.bus.payloads.arena import PayloadReader
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import DATATYPES, Tensor
from weir.worker.backend_api.interface import Execution, InstanceDevice
from weir.worker.backends.pytorch.backend import PyTorchBackend
from weir.worker.backends.pytorch.programs import Format, find_artifact

torch = later("torch")
networks = later("tests.support.models.torch_networks")

pytestmark = pytest.mark.torch


def rows(*shape: int, start: int = 0) -> np.ndarray:
    return (np.arange(int(np.prod(shape)), dtype=np.float32) + start).reshape(shape)


BOTH = "first__0:FP32:3 second__1:FP32:3"


@pytest.fixture(scope="module")
def affine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model in two formats."""
    folder = tmp_path_factory.mktemp("affine")
    script(folder, networks.Affine())
    export(folder, networks.Affine(), (torch.ones(2, 3), torch.ones(2, 3)))
    return folder


@pytest.mark.parametrize("filename", ["model.pt", "model.pt2"])
@pytest.mark.parametrize(
    "inputs",
    [
        "y:FP32:3 x:FP32:3",  # arguments of forward, in any order
        "b__1:FP32:3 a__0:FP32:3",
        "a:FP32:3 b:FP32:3",  # the configuration's order
        "x:FP32:3 b:FP32:3",
    ],
)
def test_inputs_are_found_by_argument_by_index_and_by_order(affine: Path, filename: str, inputs: str) -> None:
    made = config(inputs=inputs, outputs="sum__1:FP32:3 less__0:FP32:3", default_model_filename=filename)
    first, second = (
        [text.partition(":")[0] for text in inputs.split()]
        if not inputs.startswith(("y", "b__1"))
        else [text.partition(":")[0] for text in reversed(inputs.split())]
    )
    with instance_of(version(affine, made)) as instance:
        requests = [request(**{second: rows(n, 3, start=9), first: rows(n, 3)}) for n in (1, 3)]
        answers = run(instance, *requests)
    for n, answer in zip((1, 3), answers, strict=True):
        np.testing.assert_array_equal(answer["less__0"], 2 * rows(n, 3) - rows(n, 3, start=9))
        np.testing.assert_array_equal(answer["sum__1"], rows(n, 3) + rows(n, 3, start=9))


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ("x:FP32:3", "configuration expects 1 inputs, model provides 2"),
        ("a:FP32:3 b:FP32:3 c:FP32:3", "configuration expects 3 inputs, model provides 2"),
        ("a__0:FP32:3 b__2:FP32:3", "configuration expects 2 inputs, model provides 2"),
        ("a__0:FP32:3 b__0:FP32:3", "inputs 'a__0' and 'b__0' of model 'm' are the same argument"),
    ],
)
def test_inputs_that_do_not_fit_fail_the_load(affine: Path, inputs: str, reason: str) -> None:
    with pytest.raises(WeirError, match=reason) as raised, instance_of(version(affine, config(inputs=inputs))):
        pass
    assert raised.value.code is ErrorCode.INVALID_ARG


def test_outputs_that_are_not_as_configured_are_named(affine: Path) -> None:
    for outputs, reason in (
        ("a__0:INT64:3", "unexpected datatype TYPE_FP32 for inference output 'a__0', expecting TYPE_INT64"),
        ("a__7:FP32:3", "The output a__7 in the model configuration refers to an output index which doesn't exist"),
    ):
        made = config(inputs="x:FP32:3 y:FP32:3", outputs=outputs)
        with instance_of(version(affine, made)) as instance, pytest.raises(WeirError, match=reason):
            run(instance, request(x=rows(1, 3), y=rows(1, 3)))


def test_a_program_describes_its_tensors_under_the_names_it_is_given(affine: Path) -> None:
    described = PyTorchBackend().describe(
        version(affine, config(inputs="", outputs="", default_model_filename="model.pt2"))
    )
    assert described is not None
    shape = "TYPE_FP32", [-1, 3]
    assert [row[:3] for row in described.inputs] == [("x", *shape), ("y", *shape)]
    assert [row[:3] for row in described.outputs] == [("OUTPUT__0", *shape), ("OUTPUT__1", *shape)]
    assert len({row.first_symbol for row in [*described.inputs, *described.outputs]}) == 1
    assert described.largest_batch == 16
    named = config(inputs="b__1:FP32:3 a__0:FP32:3", outputs="sum__1:FP32:3", default_model_filename="model.pt2")
    described = PyTorchBackend().describe(version(affine, named))
    assert described is not None
    assert [tensor.name for tensor in described.inputs] == ["a__0", "b__1"]
    assert [tensor.name for tensor in described.outputs] == ["OUTPUT__0", "sum__1"]
    assert PyTorchBackend().describe(version(affine, config(default_model_filename="model.pt"))) is None


def test_inputs_that_a_program_rejects_are_client_errors(affine: Path) -> None:
    made = config(inputs="x:FP32:-1 y:FP32:-1", outputs=BOTH, max_batch_size=16, default_model_filename="model.pt2")
    with instance_of(version(affine, made)) as instance:
        for shape in ((17, 3), (2, 5)):
            with pytest.raises(WeirError, match="the model rejects its inputs: Guard failed") as raised:
                run(instance, request(x=rows(*shape), y=rows(*shape)))
            assert raised.value.code is ErrorCode.INVALID_ARG
        assert run(instance, request(x=rows(16, 3), y=rows(16, 3)))
    too_many = made.replace(max_batch_size=17)
    with pytest.raises(WeirError, match="exported for batches of at most 16"), instance_of(version(affine, too_many)):
        pass


def test_errors_of_a_run_name_no_files(affine: Path) -> None:
    made = config(inputs="x:FP32:-1 y:FP32:-1", outputs=BOTH)
    with instance_of(version(affine, made)) as instance, pytest.raises(WeirError) as raised:
        run(instance, request(x=rows(1, 3), y=rows(1, 2)))
    assert raised.value.code is ErrorCode.INTERNAL
    assert raised.value.message.startswith("PyTorch execute failure: RuntimeError: The size of tensor a (3) must match")
    assert "\n" not in raised.value.message


def test_structures_of_inputs_and_outputs(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("named", "dict", "list")]
    for folder, module in zip(
        folders, (networks.ReturnsNamed(), networks.TakesDict(), networks.TakesList()), strict=True
    ):
        folder.mkdir()
        script(folder, module)
    with instance_of(version(folders[0], config(outputs="count:INT64:1 negative:FP32:4"))) as instance:
        first, second = run(instance, request(x=rows(1, 4)), request(x=rows(2, 4)))
        assert first["count"].tolist() == [[3]]
        assert second["count"].tolist() == [[3], [3]]
        np.testing.assert_array_equal(second["negative"], -rows(2, 4))
    two = {"A": rows(1, 3, start=5), "B": rows(1, 3)}
    with instance_of(version(folders[1], config(inputs="B:FP32:3 A:FP32:3", outputs=BOTH))) as instance:
        assert run(instance, request(**two))[0]["first__0"].tolist() == [[5, 5, 5]]
    with instance_of(version(folders[2], config(inputs="A:FP32:3 B:FP32:3", outputs="y:FP32:3"))) as instance:
        assert run(instance, request(**two))[0]["y"].tolist() == [[5, 5, 5]]


def test_a_program_with_keywords_and_a_dictionary_of_outputs(tmp_path: Path) -> None:
    class Keyword(torch.nn.Module):
        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"scaled": x * scale, "whole": x.to(torch.int32)}

    batch = torch.export.Dim("batch", min=1, max=8)
    shapes = {"x": {0: batch}, "scale": {0: batch}}
    export(tmp_path, Keyword(), (torch.ones(2, 4),), kwargs={"scale": torch.ones(2, 1)}, dynamic_shapes=shapes)
    made = config(inputs="scale:FP32:1 x:FP32:4", outputs="whole:INT32:4 scaled:FP32:4")
    with instance_of(version(tmp_path, made)) as instance:
        answers = run(instance, *(request(scale=np.full((1, 1), n, np.float32), x=rows(1, 4)) for n in (2, 3)))
    assert [answer["scaled"].tolist() for answer in answers] == [[[0, 2, 4, 6]], [[0, 3, 6, 9]]]
    assert answers[0]["whole"].tolist() == [[0, 1, 2, 3]]


def test_strings_and_numbers(tmp_path: Path) -> None:
    script(tmp_path, networks.Shouts())
    made = config(inputs="words:STRING:-1 times:INT32:1", outputs="out:STRING:-1", max_batch_size=0)
    words = np.array(["ä".encode(), b"b"], np.object_)
    with instance_of(version(tmp_path, made)) as instance:
        (answer,) = run(instance, request(words=words, times=np.array([3], np.int32)))
        assert [word.decode() for word in answer["out"]] == ["ä!3", "b!3"]
        with pytest.raises(WeirError, match="must hold one value"):
            run(instance, request(words=words, times=np.array([1, 2], np.int32)))
        with pytest.raises(WeirError, match="not UTF-8"):
            run(instance, request(words=np.array([b"\xff"], np.object_), times=np.array([1], np.int32)))
        (answer,) = run(instance, request(words=words))
        assert answer["out"].tolist() == ["ä!2".encode(), b"b!2"]
        (answer,) = run(instance, request(words=words[:0]))
        assert answer["out"].tolist() == []
    with pytest.raises(WeirError, match="only supports 1 dimensional List of String as input for 'words'"):
        PyTorchBackend().load(version(tmp_path, made.replace(max_batch_size=4)))


def test_every_datatype_goes_through(tmp_path: Path) -> None:
    class Same(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    script(tmp_path, Same())
    for name in ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT64", "FP16", "BF16", "FP64"):
        made = config(inputs=f"x:{name}:2", outputs=f"y:{name}:2")
        tensor = Tensor("x", name, [1, 2], bytes([1] * 2 * DATATYPES[name].size_bytes))
        with instance_of(version(tmp_path, made)) as instance:
            (result,) = instance.execute([InferRequest("m", inputs=[tensor])], _execution())
        assert result is not None
        (output,) = result.outputs
        assert (output.datatype, list(output.shape), bytes(output.data)) == (name, [1, 2], tensor.data)


def _execution() -> Execution:
    return Execution(PayloadReader())


def test_a_model_that_writes_to_its_input_does_not_touch_the_callers_memory(tmp_path: Path) -> None:
    class Clears(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1)

    script(tmp_path, Clears())
    size = 4 * mmap.PAGESIZE
    shared = mmap.mmap(-1, size, prot=mmap.PROT_READ)  # writing to it would end the process
    with instance_of(version(tmp_path, config(inputs="x:FP32:-1"))) as instance:
        answer = instance.execute(
            [InferRequest("m", inputs=[Tensor("x", "FP32", [1, size // 4], memoryview(shared))])], _execution()
        )
        assert answer[0] is not None
        assert bytes(answer[0].outputs[0].data) == np.ones(size // 4, np.float32).tobytes()


def test_instances_share_only_programs_without_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    for module in (torch.jit, torch.export):
        monkeypatch.setattr(
            module, "load", lambda *given, load=module.load, **more: opened.append(given) or load(*given, **more)
        )
    folders = {name: tmp_path / name for name in ("script", "frozen", "exported", "stateful")}
    for folder in folders.values():
        folder.mkdir()
    script(folders["script"], networks.Counts())
    with without_warnings():
        frozen = torch.jit.freeze(torch.jit.script(torch.nn.Linear(4, 4).eval()))
    script(folders["frozen"], frozen)
    export(folders["exported"], torch.nn.Linear(4, 4), (torch.ones(2, 4),))
    export(folders["stateful"], networks.Counts(), (torch.ones(2, 4),))

    def second_response(name: str, **parameters: str) -> tuple[bool, float]:
        opened.clear()
        loaded = PyTorchBackend().load(version(folders[name], config(parameters=parameters)))
        first, second = (loaded.create_instance(InstanceDevice("KIND_CPU", 0, str(n))) for n in range(2))
        is_shared = len(opened) == 1
        zeros = np.zeros((1, 4), np.float32)
        run(first, request(x=zeros)), run(first, request(x=zeros))
        response = float(run(second, request(x=zeros))[0]["y"][0, 0])
        second.close(), first.close(), loaded.unload()
        return is_shared, response

    assert second_response("script") == (False, 1)
    assert second_response("stateful") == (False, 1)
    assert second_response("script", ENABLE_WEIGHT_SHARING="true") == (True, 3)
    assert second_response("frozen")[0]
    assert second_response("frozen", ENABLE_WEIGHT_SHARING="false")[0] is False
    assert second_response("exported")[0]


def test_sequences_get_controls_and_states(tmp_path: Path) -> None:
    class Sums(torch.nn.Module):
        def forward(
            self, x: torch.Tensor, start: torch.Tensor, total: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            total = torch.where(start > 0, x, total + x)
            return total, total

    script(tmp_path, Sums())
    batching = {
        "control_input": [
            {"name": "START__1", "control": [{"kind": "CONTROL_SEQUENCE_START", "fp32_false_true": [0, 1]}]}
        ],
        "state": [{"input_name": "IN__2", "output_name": "OUT__1", "data_type": "TYPE_FP32", "dims": [1]}],
    }
    made = config(inputs="x__0:FP32:1", outputs="y__0:FP32:1", sequence_batching=batching)
    one = np.ones((1, 1), np.float32)
    with instance_of(version(tmp_path, made)) as instance:
        (first, second) = instance.execute(
            [request(x__0=one, START__1=one, IN__2=9 * one), request(x__0=one, START__1=0 * one, IN__2=9 * one)],
            _execution(),
        )
        assert first is not None
        assert second is not None
        assert [tensor.to_numpy().tolist() for tensor in (*first.outputs, *first.states)] == [[[1]], [[1]]]
        assert [tensor.to_numpy().tolist() for tensor in (*second.outputs, *second.states)] == [[[10]], [[10]]]
    batching["control_input"][0]["name"] = "OTHER"
    with instance_of(version(tmp_path, made)):
        pass  # by argument's position, where it has no other


@pytest.mark.parametrize("filename", ["model.pt", "model.pt2"])
def test_formats_are_detected_by_content(tmp_path: Path, affine: Path, filename: str) -> None:
    made = config(inputs="x:FP32:3 y:FP32:3", outputs=BOTH, default_model_filename=filename)
    other = "model.pt2" if filename == "model.pt" else "model.pt"
    model = version(tmp_path, made)
    (model.directory / filename).write_bytes((affine / "1" / other).read_bytes())
    assert find_artifact(model).format is (Format.EXPORTED if other == "model.pt2" else Format.TORCHSCRIPT)
    with instance_of(model) as instance:
        assert run(instance, request(x=rows(1, 3), y=rows(1, 3)))


def test_a_class_with_weights_beside_it(tmp_path: Path) -> None:
    model = version(tmp_path, config(default_model_filename="model.pt"))
    torch.save({"layer.weight": torch.eye(4) * 3, "layer.bias": torch.zeros(4)}, str(model.directory / "model.pt"))
    with pytest.raises(WeirError, match="weights alone"):
        PyTorchBackend().load(model)
    (model.directory / "model.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(4, 4)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x)\n"
    )
    assert PyTorchBackend().prefers_process(model)
    weights = model.directory / "model.pt"
    assert find_artifact(model) == (Format.MODULE, model.directory / "model.py", weights)
    weights.rename(model.directory / "elsewhere")
    assert find_artifact(model) == (Format.MODULE, model.directory / "model.py", None)
    (model.directory / "elsewhere").rename(weights)
    with instance_of(model) as instance:
        np.testing.assert_allclose(run(instance, request(x=rows(1, 4)))[0]["y"], rows(1, 4) * 3)


def test_options(tmp_path: Path) -> None:
    script(tmp_path, networks.Affine())
    settings = {"INFERENCE_MODE": "false", "DISABLE_OPTIMIZED_EXECUTION": "true", "INTRA_OP_THREAD_COUNT": "2"}
    made = config(inputs="x:FP32:3 y:FP32:3", outputs=BOTH, parameters=settings)
    with instance_of(version(tmp_path, made)) as instance:
        assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.get_num_threads()) == (
            False,
            False,
            2,
        )
        run(instance, request(x=rows(1, 3), y=rows(1, 3)))
    with instance_of(version(tmp_path, made.replace(parameters={}))):
        assert (torch.is_inference_mode_enabled(), torch.get_num_threads()) == (True, 1)
    assert not torch.is_inference_mode_enabled()
    bad = config(inputs="x:FP32:3 y:FP32:3", outputs=BOTH, parameters={"INFERENCE_MODE": "maybe"})
    with pytest.raises(WeirError, match="failed to convert 'maybe' to boolean"):
        PyTorchBackend().load(version(tmp_path, bad))


def test_files_that_can_not_be_loaded(tmp_path: Path) -> None:
    model = version(tmp_path, config())
    with pytest.raises(WeirError, match=r"unable to find 'model.pt' in version 1 of 'm'"):
        PyTorchBackend().load(model)
    (model.directory / "model.pt").write_bytes(b"no zip")
    with pytest.raises(WeirError, match="neither TorchScript nor written by"):
        PyTorchBackend().load(model)
    with zipfile.ZipFile(model.directory / "model.pt", "w") as archive:
        archive.writestr("model/code/__torch__.py", "no code")
    with pytest.raises(WeirError, match="failed to load model 'm'") as raised, instance_of(model):
        pass
    assert str(tmp_path) not in raised.value.message


def test_instances_on_a_gpu_need_one(affine: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    model = version(affine, config(inputs="x:FP32:3 y:FP32:3", outputs=BOTH))
    with (
        pytest.raises(WeirError, match=r"of kind KIND_GPU, but torch .* finds no usable GPU"),
        instance_of(model, "KIND_GPU"),
    ):
        pass
    with instance_of(model, "KIND_MODEL") as instance:
        assert run(instance, request(x=rows(1, 3), y=rows(1, 3)))

import pytest

from weir.repository.completion import DescribedModel, DescribedTensor, fill_backend
from weir.repository.layout import ModelRepository, select_versions
from weir.repository.loading import read_config, resolve_config
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import ErrorCode, WeirError

DESCRIBED = DescribedModel(
    [DescribedTensor("x", "TYPE_FP32", (-1, 3))],
    [DescribedTensor("y", "TYPE_FP32", (-1, 2))],
)


@pytest.fixture
def add(tmp_path):
    """Adds a model with the given files (text by path) to a repository, and finds it there."""

    def add_model(name, **files):
        for file, text in files.items():
            path = tmp_path / name / file.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return ModelRepository([tmp_path]).find(name)

    return add_model


def test_a_worker_goes_from_folder_to_configuration(add):
    found = add("net", **{"1__model.onnx": "", "3__model.onnx": "", "config.pbtxt": "max_batch_size: 16"})
    source = read_config(found)
    assert (source.config.name, source.config.backend) == ("net", "onnxruntime")
    assert found.artifact(3, source.config.default_model_filename) == found.path / "3" / "model.onnx"
    config = resolve_config(source, DESCRIBED, gpu_ids=[])
    assert config.max_batch_size == 16
    assert config.dynamic_batching.preferred_batch_size == [16]
    assert config.input[0].dims == [3]
    assert select_versions(config, found.versions) == [3]


def test_a_model_without_configuration(add):
    config = resolve_config(read_config(add("net", **{"1__model.onnx": ""})), DESCRIBED, gpu_ids=[])
    assert (config.platform, config.max_batch_size, config.default_model_filename) == (
        "onnxruntime_onnx",
        4,
        "model.onnx",
    )


def test_without_completion_the_configuration_is_used_alone(add):
    found = add("net", **{"1__model.py": "", "config.pbtxt": 'input { name: "x" }'})
    with pytest.raises(
        WeirError, match=r"must specify 'data_type' for net \(net/config.pbtxt:1, field 'input\[0\].data_type'\)"
    ):
        resolve_config(read_config(found), None, gpu_ids=[])


@pytest.mark.parametrize("field", ["input", "output"])
def test_a_configured_scalar_without_batches_is_rejected(add, field):
    name = {"input": "x", "output": "y"}[field]
    text = f'max_batch_size: 0\n{field} {{ name: "{name}" data_type: TYPE_FP32 dims: [ 1 ] reshape {{ }} }}'
    found = add("net", **{"1__model.onnx": "", "config.pbtxt": text})
    scalars = DescribedModel([DescribedTensor("x", "TYPE_FP32", ())], [DescribedTensor("y", "TYPE_FP32", ())])
    reason = f"model {field} '{name}' cannot have empty reshape for non-batching model as scalar tensors are not"
    with pytest.raises(WeirError, match=reason):
        resolve_config(read_config(found), scalars, gpu_ids=[])
    (found.path / "config.pbtxt").write_text("")
    assert resolve_config(read_config(found), scalars, gpu_ids=[]).input[0].reshape.shape == []


def test_an_override_replaces_the_file(add):
    found = add("net", **{"1__model.onnx": "", "config.pbtxt": "broken"})
    source = read_config(found, '{"max_batch_size": 2}')
    assert resolve_config(source, DESCRIBED, gpu_ids=[]).max_batch_size == 2
    with pytest.raises(WeirError, match=r"\(field 'max_batch_size'\)$"):
        resolve_config(read_config(found, '{"max_batch_size": -2}'), DESCRIBED, gpu_ids=[])


@pytest.mark.parametrize(
    "text, place, reason",
    [
        (
            'backend: "onnxruntime"\nname: "other"',
            "net/config.pbtxt:2, field 'name'",
            "unexpected directory name 'net' for model 'other', directory name must equal model name",
        ),
        (
            'name: "other"\nplatform: "ensemble"',
            "net/config.pbtxt:2, field 'platform'",
            "ensemble scheduling must be set for ensemble other whose platform is ensemble",
        ),
        ("# about\nmax_batch_size: -1", "net/config.pbtxt:2, field 'max_batch_size'", "must be non-negative"),
        (
            'input [\n {\n  name: "x"\n  dims: [ 4 ]\n }\n]\nmax_batch_size: 8',
            "net/config.pbtxt:4, field 'input[0].dims'",
            "tensor 'x'",
        ),
        ('output {\n name: "y"\n}\noutput {\n name: "z"\n}', "net/config.pbtxt:5, field 'output[1].name'", "'z'"),
        (
            "dynamic_batching {\n preferred_batch_size: 9\n}\nmax_batch_size: 8",
            "net/config.pbtxt:2, field 'dynamic_batching.preferred_batch_size'",
            "<= max batch size",
        ),
        (
            "instance_group {}\ninstance_group {\n kind: KIND_GPU }",
            "net/config.pbtxt:3, field 'instance_group[1].kind'",
            "no GPUs are available",
        ),
        (
            "\noutput: {\n name: 'y' label_filename: '../labels' }",
            "net/config.pbtxt:3, field 'output[0].label_filename'",
            "stay within",
        ),
        (
            "\nmodel_warmup [ { batch_size: 1 },\n { batch_size: 1 inputs { key: 'x' value {} } } ]",
            "net/config.pbtxt:3, field 'model_warmup[1].inputs'",
            "'data_type'",
        ),
        (
            "max_batch_size: 4\nplatform: 'tensorrt_plan'\nbackend: 'python'",
            "net/config.pbtxt:3, field 'backend'",
            "unexpected 'platform' and 'backend' pair",
        ),
        (
            "# nothing about tensors\nbatch_input { target_name: 'n' }",
            "net/config.pbtxt:2, field 'batch_input[0].data_type'",
            "TYPE_INT32",
        ),
    ],
)
def test_an_invalid_configuration_names_file_line_and_field(add, text, place, reason):
    found = add("net", **{"1__model.onnx": "", "config.pbtxt": text})
    with pytest.raises(WeirError) as caught:
        resolve_config(read_config(found), DESCRIBED, gpu_ids=[])
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.message.endswith(f" ({place})")
    assert reason in caught.value.message
    assert str(found.path.parent) not in caught.value.message


def test_a_chosen_configuration_is_named_in_errors(add, tmp_path):
    add("net", **{"1__model.onnx": "", "config.pbtxt": "", "configs__small.pbtxt": "max_batch_size: -1"})
    found = ModelRepository([tmp_path], config_name="small").find("net")
    with pytest.raises(WeirError, match=r"\(net/configs/small.pbtxt:1, field 'max_batch_size'\)"):
        resolve_config(read_config(found), DESCRIBED, gpu_ids=[])


def test_a_link_out_of_the_folder_is_not_read(add, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("password: 1")
    found = add("net", **{"1__model.onnx": ""})
    (found.path / "config.pbtxt").symlink_to(secret)
    with pytest.raises(WeirError, match="must stay within the model's folder"):
        read_config(ModelRepository([tmp_path]).find("net"))


def test_a_duplicate_is_not_read(tmp_path):
    for repository in ("r1", "r2"):
        (tmp_path / repository / "net" / "1").mkdir(parents=True)
    found = ModelRepository([tmp_path / "r1", tmp_path / "r2"]).find("net")
    with pytest.raises(WeirError, match="in two or more repositories") as caught:
        read_config(found)
    assert caught.value.code is ErrorCode.UNAVAILABLE


@pytest.mark.parametrize(
    "fields, files, expected",
    [
        ({}, ["model.plan"], ("tensorrt", "tensorrt_plan", "model.plan")),
        ({}, ["model.onnx"], ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ({}, ["model.xml"], ("openvino", "", "model.xml")),
        ({}, ["model.pt"], ("pytorch", "pytorch_libtorch", "model.pt")),
        ({}, ["model.pt2"], ("pytorch", "torch_aoti", "model.pt2")),
        ({}, ["model.py"], ("python", "", "model.py")),
        ({}, ["model.py", "model.onnx"], ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ({"backend": "python"}, ["model.py", "model.onnx"], ("python", "", "model.py")),
        ({"backend": "pytorch"}, ["model.pt2"], ("pytorch", "torch_aoti", "model.pt2")),
        ({"backend": "pytorch"}, [], ("pytorch", "pytorch_libtorch", "model.pt")),
        ({"platform": "onnxruntime_onnx"}, [], ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        (
            {"platform": "onnxruntime_onnx", "default_model_filename": "a.onnx"},
            [],
            ("onnxruntime", "onnxruntime_onnx", "a.onnx"),
        ),
        ({"platform": "mine", "backend": "python"}, ["model.py"], ("python", "mine", "model.py")),
        ({"platform": "tensorrt_plan", "backend": "python"}, ["model.py"], ("python", "tensorrt_plan", "")),
        ({"backend": "identity"}, ["model.onnx"], ("identity", "", "")),
        ({"platform": "caffe"}, ["model.onnx"], ("", "caffe", "")),
        ({"platform": "ensemble"}, ["model.onnx"], ("", "ensemble", "")),
        ({"ensemble_scheduling": {}}, [], ("", "ensemble", "")),
        ({"name": "net.identity"}, [], ("identity", "", "")),
    ],
)
def test_files_determine_the_backend(tmp_path, fields, files, expected):
    for file in files:
        (tmp_path / file).touch()
    filled = fill_backend(ModelConfig.model_validate({"name": "net", **fields}), tmp_path)
    assert (filled.backend, filled.platform, filled.default_model_filename) == expected


def test_without_a_known_file_the_backend_is_unknown():
    with pytest.raises(
        WeirError, match="Could not determine backend for model 'net' with no backend in model configuration"
    ):
        fill_backend(ModelConfig(name="net"), None)

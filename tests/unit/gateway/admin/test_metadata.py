import pytest
from tritonclient.grpc import service_pb2

from weir.calls.catalog import ServedModel
from weir.gateway.admin.metadata import EXTENSIONS, model_metadata, server_metadata
from weir.schemas.config.model_config import ModelConfig, ModelInput, ModelOutput

TRITON_ORDER = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)


def served(versions: list[int], **changes: object) -> ServedModel:
    config = ModelConfig(
        name="resnet",
        backend="onnxruntime",
        platform="onnxruntime_onnx",
        max_batch_size=8,
        input=[ModelInput(name="image", data_type="TYPE_FP32", dims=[3, -1, -1])],
        output=[ModelOutput(name="label", data_type="TYPE_STRING", dims=[1])],
    ).replace(**changes)
    return ServedModel("resnet", config, versions, {})


def test_server_metadata_names_the_server_and_its_version() -> None:
    metadata = server_metadata("my-server")
    assert metadata["name"] == "my-server"
    assert metadata["version"][0].isdigit()


def test_extensions_are_those_of_triton_in_its_order() -> None:
    assert EXTENSIONS == TRITON_ORDER


def test_model_metadata_lists_ready_versions_and_prepends_the_batch_dimension() -> None:
    assert model_metadata(served([1, 3]), "") == {
        "name": "resnet",
        "versions": ["1", "3"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "image", "datatype": "FP32", "shape": [-1, 3, -1, -1]}],
        "outputs": [{"name": "label", "datatype": "BYTES", "shape": [-1, 1]}],
    }


def test_a_model_without_batching_has_its_own_dims_only() -> None:
    metadata = model_metadata(served([1], max_batch_size=0), "")
    assert metadata["inputs"][0]["shape"] == [3, -1, -1]


def test_only_the_requested_version_is_listed() -> None:
    assert model_metadata(served([1, 3]), "3")["versions"] == ["3"]


def test_the_backend_stands_in_for_a_missing_platform() -> None:
    assert model_metadata(served([1], platform="", backend="python"), "")["platform"] == "python"


@pytest.mark.parametrize(
    "message_type,fields",
    [
        (service_pb2.ServerMetadataResponse, server_metadata("triton")),
        (service_pb2.ModelMetadataResponse, model_metadata(served([1, 2]), "")),
    ],
)
def test_the_dictionaries_fill_the_protobuf_messages(message_type: type, fields: dict) -> None:
    message = message_type(**fields)
    assert {descriptor.name for descriptor, _ in message.ListFields()} == set(fields)

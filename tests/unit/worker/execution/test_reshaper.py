import pytest

from weir.schemas.config.model_config import ModelConfig, ModelInput, ModelOutput, Reshape
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor
from weir.worker.backend_api.interface import Result
from weir.worker.execution.batch_tensors import Reshaper


def reshaper(dims: list[int], shape: list[int], batching: bool) -> Reshaper:
    reshape = Reshape(shape=shape)
    return Reshaper(
        ModelConfig(
            name="m",
            max_batch_size=4 if batching else 0,
            input=[ModelInput(name="IN", data_type="TYPE_FP32", dims=dims, reshape=reshape)],
            output=[ModelOutput(name="OUT", data_type="TYPE_FP32", dims=dims, reshape=reshape)],
        )
    )


@pytest.mark.parametrize(
    ("dims", "shape", "batching", "client", "model"),
    [
        ([2, 3], [6], False, [2, 3], [6]),
        ([2, 3], [6], True, [4, 2, 3], [4, 6]),
        ([1], [], True, [4, 1], [4]),
        ([-1, 2], [2, -1, 1], True, [4, 7, 2], [4, 2, 7, 1]),
        ([-1, 5, -1], [-1, -1, 5], False, [3, 5, 9], [3, 9, 5]),
    ],
)
def test_shapes_are_converted_in_both_directions(
    dims: list[int], shape: list[int], batching: bool, client: list[int], model: list[int]
) -> None:
    between = reshaper(dims, shape, batching)
    assert between.is_needed
    request = InferRequest("m", inputs=[Tensor("IN", "FP32", client, b""), Tensor("OTHER", "FP32", [7], b"")])
    between.to_model(request)
    assert [list(tensor.shape) for tensor in request.inputs] == [model, [7]]
    result = Result(outputs=[Tensor("OUT", "FP32", model, b""), Tensor("OTHER", "FP32", [7], b"")])
    between.to_client(result)
    assert [list(tensor.shape) for tensor in result.outputs] == [client, [7]]


def test_models_without_reshape_need_no_conversion() -> None:
    config = ModelConfig(name="m", input=[ModelInput(name="IN", data_type="TYPE_FP32", dims=[1])])
    assert not Reshaper(config).is_needed

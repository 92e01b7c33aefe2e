"""`triton_python_backend_utils`, as a model uses it, without a process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import weir.worker.python_stub
from weir.schemas.core.errors import ErrorCode
from weir.schemas.core.tensors import DATATYPES

_STUB_FOLDER = str(Path(weir.worker.python_stub.__file__).parent)
sys.path.insert(0, _STUB_FOLDER)
import triton_python_backend_utils as pb_utils  # noqa: E402
from _weir_tensor import DTYPES  # noqa: E402

sys.path.remove(_STUB_FOLDER)

CONFIG = {
    "name": "m",
    "max_batch_size": 4,
    "input": [{"name": "A", "data_type": "TYPE_FP32", "dims": [-1, 3]}],
    "output": [{"name": "B", "data_type": "TYPE_INVALID", "dims": []}],
}


def model_config(**changes: object) -> pb_utils.ModelConfig:
    return pb_utils.ModelConfig(json.dumps(CONFIG | changes))


class TestTypes:
    def test_types_and_codes_are_the_servers(self) -> None:
        assert {name: datatype.numpy for name, datatype in DATATYPES.items()} == DTYPES
        doors_own = {ErrorCode.UNAUTHENTICATED, ErrorCode.PERMISSION_DENIED}  # no model decides who may send a request
        for code in set(ErrorCode) - doors_own:
            assert getattr(pb_utils.TritonError, code.name) == code.number

    @pytest.mark.parametrize("datatype", [d for d in DATATYPES.values() if d.name != "BF16"])
    def test_conversions_agree_with_each_other(self, datatype) -> None:
        scalar = pb_utils.triton_string_to_numpy(datatype.config_name)
        number = pb_utils.numpy_to_triton_type(scalar)
        assert np.dtype(scalar) == datatype.numpy
        assert pb_utils.triton_to_numpy_type(number) is scalar

    def test_numbers_are_those_of_the_protobuf(self) -> None:
        from tritonclient.grpc import model_config_pb2

        for datatype in DATATYPES.values():
            number = model_config_pb2.DataType.Value(datatype.config_name)
            if datatype.name != "BF16":
                assert pb_utils.numpy_to_triton_type(pb_utils.triton_to_numpy_type(number)) == number

    def test_types_triton_lacks(self) -> None:
        assert pb_utils.numpy_to_triton_type(np.complex64) is None
        assert pb_utils.triton_to_numpy_type(pb_utils.Tensor.from_dlpack("A", np.zeros(1)).triton_dtype()) is np.float64
        assert pb_utils.triton_to_numpy_type(14) is None
        with pytest.raises(KeyError):
            pb_utils.triton_string_to_numpy("TYPE_COMPLEX")


class TestTensor:
    def test_repr(self) -> None:
        tensor = pb_utils.Tensor("A", np.zeros((2, 3), np.float32))
        assert (tensor.name(), tensor.shape(), tensor.is_cpu()) == ("A", [2, 3], True)
        assert pb_utils.triton_to_numpy_type(tensor.triton_dtype()) is np.float32

    @pytest.mark.parametrize("array", [np.zeros(1, np.complex64), np.zeros(1, "M8[s]")])
    def test_rejects_types_that_triton_does_not_have(self, array) -> None:
        with pytest.raises(pb_utils.TritonModelException, match=r"^NumPy dtype is not supported\.$"):
            pb_utils.Tensor("A", array)

    def test_rejects_values_that_are_not_arrays(self) -> None:
        with pytest.raises(TypeError, match="incompatible constructor arguments"):
            pb_utils.Tensor("A", [1, 2])

    @pytest.mark.parametrize("name", [None, 1])
    def test_rejects_names_that_are_no_text(self, name) -> None:
        with pytest.raises(TypeError, match="incompatible constructor arguments"):
            pb_utils.Tensor(name, np.zeros(1))

    def test_rejects_an_empty_name(self) -> None:
        with pytest.raises(pb_utils.TritonModelException, match=r"^Tensor name cannot be an empty string\.$"):
            pb_utils.Tensor("", np.zeros(1))
        with pytest.raises(pb_utils.TritonModelException, match=r"^Tensor name cannot be an empty string\.$"):
            pb_utils.Tensor.from_dlpack("", np.zeros(1))

    @pytest.mark.parametrize("limit", [0, 1000])
    def test_content_is_little_endian_and_row_major(self, limit) -> None:
        array = np.arange(6, dtype=">i4").reshape(2, 3).T
        content = pb_utils.Tensor("A", array).content(limit)
        assert bytes(content) == np.array([0, 3, 1, 4, 2, 5], "<i4").tobytes()

    def test_received_arrays_are_the_models_own(self) -> None:
        content = np.arange(4, dtype=np.float32).tobytes()
        array = pb_utils.Tensor.received("A", "FP32", (2, 2), content).as_numpy()
        array += 1
        assert array.tolist() == [[1, 2], [3, 4]]
        assert content == np.arange(4, dtype=np.float32).tobytes()

    @pytest.mark.parametrize("datatype,content", [("FP32", b"123"), ("FP32", bytes(8)), ("BYTES", b"\1\0\0\0")])
    def test_content_that_does_not_fill_the_shape(self, datatype, content) -> None:
        with pytest.raises(ValueError):
            pb_utils.Tensor.received("A", datatype, (1,), content).as_numpy()

    def test_strings(self) -> None:
        mixed = np.array(["grün", b"\x00\xff", 7], dtype=np.object_)
        elements = pb_utils.deserialize_bytes_tensor(pb_utils.serialize_byte_tensor(mixed))
        assert elements.tolist() == ["grün".encode(), b"\x00\xff", b"7"]
        fixed = pb_utils.serialize_byte_tensor(np.array([b"a", b"bc"]))
        assert pb_utils.deserialize_bytes_tensor(fixed).tolist() == [b"a", b"bc"]
        assert pb_utils.serialize_byte_tensor(np.empty(0, np.object_)) == b""


class TestDlpack:
    def test_shares_memory_both_ways(self) -> None:
        array = np.arange(6, dtype=np.int16).reshape(2, 3)
        exported = np.from_dlpack(pb_utils.Tensor("A", array))
        assert np.shares_memory(exported, array)
        imported = pb_utils.Tensor.from_dlpack("B", array)
        assert np.shares_memory(imported.as_numpy(), array)
        assert imported.shape() == [2, 3]

    def test_imported_tensors_can_be_changed_and_exported(self) -> None:
        array = np.arange(6, dtype=np.float32)
        tensor = pb_utils.Tensor.from_dlpack("A", array)
        tensor.as_numpy()[0] = 7
        assert np.from_dlpack(tensor)[0] == array[0] == 7
        again = pb_utils.Tensor.from_dlpack("B", tensor.to_dlpack())
        del tensor
        assert again.as_numpy().tolist() == [7, 1, 2, 3, 4, 5]

    def test_bare_capsules(self) -> None:
        array = np.array([True, False])
        tensor = pb_utils.Tensor.from_dlpack("A", pb_utils.Tensor("A", array).to_dlpack())
        assert tensor.as_numpy().tolist() == [True, False]
        assert tensor.datatype() == "BOOL"

    def test_bf16_keeps_its_type_and_bits(self) -> None:
        bits = np.array([0x3F80, 0xC000], np.uint16)
        received = pb_utils.Tensor.received("A", "BF16", (2,), bits.tobytes())
        again = pb_utils.Tensor.from_dlpack("B", received.to_dlpack())
        assert again.datatype() == "BF16"
        assert bytes(again.content(0)) == bits.tobytes()

    def test_bf16_arrays_of_numpy_extensions(self) -> None:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        tensor = pb_utils.Tensor("A", np.array([1.0, -2.0], ml_dtypes.bfloat16))
        assert tensor.datatype() == "BF16"
        assert bytes(tensor.content(0)) == np.array([0x3F80, 0xC000], np.uint16).tobytes()

    def test_bf16_has_no_numpy_array(self) -> None:
        received = pb_utils.Tensor.received("A", "BF16", (2,), bytes(4))
        for tensor in (received, pb_utils.Tensor.from_dlpack("B", received.to_dlpack())):
            with pytest.raises(pb_utils.TritonModelException, match="BF16 and cannot be converted to numpy"):
                tensor.as_numpy()

    def test_a_capsule_holds_a_reference_to_its_tensor(self) -> None:
        tensor = pb_utils.Tensor.received("A", "FP32", (2,), np.array([1, 2], np.float32).tobytes())
        before = sys.getrefcount(tensor)
        capsule = tensor.to_dlpack()
        assert sys.getrefcount(tensor) == before + 1
        array = np.from_dlpack(tensor)
        assert sys.getrefcount(tensor) == before + 2
        del capsule
        assert sys.getrefcount(tensor) == before + 1
        del tensor
        assert array.tolist() == [1, 2]

    def test_refusals(self) -> None:
        with pytest.raises(pb_utils.TritonModelException, match="not contiguous"):
            pb_utils.Tensor.from_dlpack("A", np.zeros((2, 3)).T)
        with pytest.raises(pb_utils.TritonModelException, match="string"):
            pb_utils.Tensor("A", np.array(["a"])).to_dlpack()
        with pytest.raises(pb_utils.TritonModelException, match="Provided tensor is not supported"):
            pb_utils.Tensor.from_dlpack("A", object())


class OnDevice:
    """A tensor in the memory of a GPU, as torch and cupy have them: only its framework can bring it to the host."""

    def __init__(self, array: np.ndarray, copy: str) -> None:
        setattr(self, copy, lambda: array)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self) -> object:
        raise AssertionError("its memory can't be read here")


class TestDevice:
    @pytest.mark.parametrize("copy", ["cpu", "get"])
    def test_is_copied_to_the_host_by_its_framework(self, copy: str) -> None:
        tensor = pb_utils.Tensor.from_dlpack("A", OnDevice(np.arange(3.0), copy))
        assert (tensor.as_numpy().tolist(), tensor.is_cpu()) == ([0, 1, 2], True)

    def test_of_a_framework_that_can_not(self) -> None:
        with pytest.raises(pb_utils.TritonModelException, match="torch or cupy"):
            pb_utils.Tensor.from_dlpack("A", OnDevice(np.zeros(1), "other"))


class TestMessages:
    def test_tensors_by_name(self) -> None:
        tensor = pb_utils.Tensor("A", np.zeros(1))
        request = pb_utils.InferenceRequest(inputs=[tensor], requested_output_names=["B"])
        assert pb_utils.get_input_tensor_by_name(request, "A") is tensor
        assert pb_utils.get_input_tensor_by_name(request, "B") is None
        response = pb_utils.InferenceResponse([tensor])
        assert pb_utils.get_output_tensor_by_name(response, "A") is tensor
        assert pb_utils.get_output_tensor_by_name(response, "B") is None

    def test_an_error_hides_outputs(self) -> None:
        error = pb_utils.TritonError("no", pb_utils.TritonError.NOT_FOUND)
        response = pb_utils.InferenceResponse([pb_utils.Tensor("A", np.zeros(1))], error)
        assert response.has_error()
        assert (response.error().message(), response.error().code()) == ("no", pb_utils.TritonError.NOT_FOUND)
        assert pb_utils.get_output_tensor_by_name(response, "A") is None

    def test_checks_of_arguments(self) -> None:
        with pytest.raises(pb_utils.TritonModelException, match="Correlation ID must be integer or string"):
            pb_utils.InferenceRequest(correlation_id=1.5)
        with pytest.raises(pb_utils.TritonModelException, match="to have type bool/int/str, found type"):
            pb_utils.InferenceRequest(parameters={"a": 1.5})
        with pytest.raises(TypeError, match="incompatible constructor arguments"):
            pb_utils.InferenceResponse([np.zeros(1)])
        with pytest.raises(TypeError, match="incompatible constructor arguments"):
            pb_utils.InferenceResponse(output_tensors=None)
        with pytest.raises(pb_utils.TritonModelException, match="should not be empty"):
            pb_utils.InferenceResponse([None])
        with pytest.raises(TypeError, match="incompatible constructor arguments"):
            pb_utils.InferenceResponse(error="no")
        for value in ([1], None, 1.5):
            text = f"Expect parameters values to have type bool/int/str, found type {type(value)}"
            with pytest.raises(pb_utils.TritonModelException, match=text):
                pb_utils.InferenceResponse(parameters={"a": value})
        with pytest.raises(pb_utils.TritonModelException, match=", got <class 'list'>"):
            pb_utils.InferenceResponse(parameters=[])
        with pytest.raises(pb_utils.TritonModelException, match="64 bits, found 18446744073709551616"):
            pb_utils.InferenceResponse(parameters={"a": 1 << 64})
        with pytest.raises(pb_utils.TritonModelException, match="keys"):
            pb_utils.InferenceResponse(parameters={1: "a"})
        for arguments in (("no", 99), ("no", "b"), (5,)):
            with pytest.raises(TypeError, match="incompatible constructor arguments"):
                pb_utils.TritonError(*arguments)

    def test_parameters_are_json(self) -> None:
        parameters = {"a": 1, "b": "x", "c": True}
        assert json.loads(pb_utils.InferenceRequest(parameters=parameters).parameters()) == parameters
        assert json.loads(pb_utils.InferenceResponse(parameters=parameters).parameters()) == parameters


class TestRequestsOfModels:
    def test_names_of_outputs_count_once(self) -> None:
        request = pb_utils.InferenceRequest(requested_output_names=["B", "A", "B"])
        assert request.requested_output_names() == ["B", "A"]

    def test_names_may_be_elements_of_a_bytes_tensor(self) -> None:
        request = pb_utils.InferenceRequest(b"id", model_name=b"m", requested_output_names=[b"A", "B"])
        assert request.request_id() == "id"
        assert request.model_name == "m"
        assert request.requested_output_names() == ["A", "B"]
        with pytest.raises(TypeError, match="incompatible constructor arguments"):
            pb_utils.InferenceRequest(model_name=b"\xff")

    @pytest.mark.parametrize(
        "wrong",
        [
            {"request_id": 1},
            {"inputs": [1]},
            {"inputs": 1},
            {"requested_output_names": [1]},
            {"model_name": 3},
            {"model_version": "1"},
            {"flags": -1},
            {"timeout": -1},
            {"preferred_memory": 3},
            {"trace": 3},
        ],
    )
    def test_other_types(self, wrong: dict) -> None:
        with pytest.raises(TypeError, match="incompatible constructor arguments"):
            pb_utils.InferenceRequest(**wrong)

    @pytest.mark.parametrize(
        ("wrong", "text"),
        [
            ({"correlation_id": 1.5}, "Correlation ID must be integer or string"),
            ({"correlation_id": -1}, "Correlation ID must be an integer of 64 bits without a sign, or a string"),
            (
                {"parameters": {"a": 1.5}},
                "Expect parameters values to have type bool/int/str, found type <class 'float'>",
            ),
            ({"parameters": {1: 1}}, "Expect parameters keys to have type str, found type <class 'int'>"),
            ({"parameters": [1]}, "Expect parameters to have type dict, got <class 'list'>"),
            (
                {"inputs": [None], "model_name": "m", "request_id": "r"},
                "Input tensor for request with id 'r' and model name 'm' should not be empty.",
            ),
        ],
    )
    def test_wrong_values(self, wrong: dict, text: str) -> None:
        with pytest.raises(pb_utils.TritonModelException) as caught:
            pb_utils.InferenceRequest(**wrong)
        assert str(caught.value) == text

    def test_preferred_memory(self) -> None:
        memory = pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 0)
        pb_utils.InferenceRequest(preferred_memory=memory)
        with pytest.raises(TypeError, match="incompatible constructor arguments"):
            pb_utils.PreferredMemory(1)

    def test_outside_of_a_server(self) -> None:
        for attempt in (pb_utils.InferenceRequest().exec, lambda: pb_utils.load_model("m")):
            with pytest.raises(pb_utils.TritonModelException, match="this process runs outside of a server"):
                attempt()


class TestModelConfig:
    def test_entries_by_name(self) -> None:
        assert pb_utils.get_input_config_by_name(CONFIG, "A") == CONFIG["input"][0]
        assert pb_utils.get_output_config_by_name(CONFIG, "B") == CONFIG["output"][0]
        assert pb_utils.get_input_config_by_name(CONFIG, "B") is None
        assert pb_utils.get_output_config_by_name({}, "B") is None

    def test_decoupled(self) -> None:
        assert not pb_utils.using_decoupled_model_transaction_policy(CONFIG)
        assert pb_utils.using_decoupled_model_transaction_policy({"model_transaction_policy": {"decoupled": True}})

    def test_completes_open_fields_and_adds_new_ones(self) -> None:
        config = model_config()
        config.set_max_batch_size(8)
        config.set_dynamic_batching()
        config.set_model_transaction_policy({"decoupled": False})
        config.add_input({"name": "A", "data_type": "TYPE_FP32", "dims": [-1, 3], "optional": True})
        config.add_output({"name": "B", "data_type": "TYPE_INT8", "dims": [1]})
        config.add_output({"name": "C", "data_type": "TYPE_INT8", "dims": [1]})
        assert config.as_dict() == {
            "name": "m",
            "max_batch_size": 8,
            "dynamic_batching": {},
            "model_transaction_policy": {"decoupled": False},
            "input": [{"name": "A", "data_type": "TYPE_FP32", "dims": [-1, 3], "optional": True}],
            "output": [
                {"name": "B", "data_type": "TYPE_INT8", "dims": [1]},
                {"name": "C", "data_type": "TYPE_INT8", "dims": [1]},
            ],
        }

    @pytest.mark.parametrize(
        "complete,message",
        [
            (
                lambda config: config.set_max_batch_size(2),
                "configuration specified max_batch_size 4, but in auto-complete-config function for model 'm' "
                "specified max_batch_size 2",
            ),
            (
                lambda config: config.add_input({"name": "A", "data_type": "TYPE_FP32"}),
                "input 'A' in auto-complete-config function for model 'm' is missing 'dims' property.",
            ),
            (
                lambda config: config.add_output({"name": "B", "dims": [1]}),
                "output 'B' in auto-complete-config function for model 'm' is missing 'data_type' property.",
            ),
            (
                lambda config: config.add_output({"dims": [1], "data_type": "TYPE_FP32"}),
                "output in auto-complete-config function for model 'm' is missing 'name' property.",
            ),
            (
                lambda config: config.add_output(
                    {"name": "B", "data_type": "TYPE_INT8", "dims": [1], "optional": True}
                ),
                "output 'B' in auto-complete-config function for model 'm' contains property other than "
                "'name', 'data_type' and 'dims'.",
            ),
            (
                lambda config: config.add_input({"name": "A", "data_type": "TYPE_INT8", "dims": [-1, 3]}),
                "unable to load model 'm', configuration expects datatype TYPE_FP32 for input 'A', "
                "model provides TYPE_INT8",
            ),
            (
                lambda config: config.add_input({"name": "A", "data_type": "TYPE_FP32", "dims": [3]}),
                "model 'm', tensor 'A': the model expects dims [3] but the model configuration specifies dims [-1, 3]",
            ),
            (
                lambda config: config.set_model_transaction_policy({"coupled": True}),
                "model transaction property in auto-complete-config function for model 'm' contains property other than "
                "'decoupled'.",
            ),
        ],
    )
    def test_conflicts_are_named(self, complete, message) -> None:
        with pytest.raises(ValueError) as caught:
            complete(model_config())
        assert str(caught.value) == message

    def test_other_schedulers_stand(self) -> None:
        with pytest.raises(ValueError, match="sequence_batching"):
            model_config(sequence_batching={}).set_dynamic_batching()

    def test_the_transaction_policy_can_not_be_changed(self) -> None:
        config = model_config(model_transaction_policy={"decoupled": True})
        with pytest.raises(ValueError, match="already set to 'True'"):
            config.set_model_transaction_policy({"decoupled": False})


class TestLogger:
    def test_one_quoted_line_each(self, capsys) -> None:
        pb_utils.Logger.log_warn('two\nlines "quoted"')
        pb_utils.Logger.log("plain", pb_utils.Logger.ERROR)
        warning, error = capsys.readouterr().err.splitlines()
        assert warning.startswith("W")
        assert "test_triton_python_backend_utils.py:" in warning
        assert warning.endswith(r'] "two\nlines \"quoted\""')
        assert error.startswith("E")

    @pytest.mark.parametrize("level", [0, 1, 9, None, "INFO"])
    def test_rejects_levels_that_are_none(self, level) -> None:
        with pytest.raises(TypeError, match="incompatible function arguments"):
            pb_utils.Logger.log("a message", level)

    def test_levels_have_the_names_and_numbers_of_triton(self) -> None:
        levels = [(level.name, int(level)) for level in pb_utils.Logger.LogLevel]
        assert levels == [("INFO", 0), ("WARNING", 1), ("ERROR", 2), ("VERBOSE", 3)]
        assert [getattr(pb_utils.Logger, name) for name, _ in levels] == list(pb_utils.Logger.LogLevel)

    def test_verbose_messages_only_if_enabled(self, capsys, monkeypatch) -> None:
        pb_utils.Logger.log_verbose("quiet")
        monkeypatch.setattr(pb_utils.Logger, "_shown", frozenset({pb_utils.Logger.VERBOSE}))
        pb_utils.Logger.log_verbose("loud")
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith('"loud"')

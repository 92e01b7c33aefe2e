"""Requests and responses of Python models, `auto_complete_config` included, with real processes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.models.processes import model_processes
from tests.support.models.python_scripts import IDENTITY, Models, error_of, execute_body, numbers, only, python_request
from weir.schemas.core.errors import ErrorCode, WeirError
from weir.schemas.core.tensors import DATATYPES, PayloadRef, Tensor
from weir.worker.backends.python.backend import may_auto_complete
from weir.worker.backends.python.process import ProcessSpec, auto_complete


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


class TestTensors:
    def test_every_datatype_small_and_large(self, models: Models) -> None:
        random = np.random.default_rng(0)
        tensors = []
        for name, datatype in DATATYPES.items():
            if name == "BYTES":
                continue
            for count in (0, 3, 100_000):
                raw = random.integers(0, 2 if name == "BOOL" else 256, count * datatype.size_bytes, dtype=np.uint8)
                tensors.append(Tensor(f"{name}-{count}", name, [count], raw.tobytes()))
        with models.running(
            execute_body("""
            responses = []
            for request in requests:
                # BF16 goes through DLPack, all others through numpy.
                outputs = [
                    pb_utils.Tensor.from_dlpack(t.name(), t.to_dlpack())
                    if t.triton_dtype() == 14 else pb_utils.Tensor(t.name(), t.as_numpy())
                    for t in request.inputs()
                ]
                responses.append(pb_utils.InferenceResponse(outputs))
            return responses
        """)
        ) as process:
            response = only(process.execute([python_request(inputs=tensors)]))
        assert [(t.name, t.datatype, list(t.shape)) for t in response.outputs] == [
            (t.name, t.datatype, t.shape) for t in tensors
        ]
        assert all(bytes(got.data) == sent.data for got, sent in zip(response.outputs, tensors, strict=True))

    @pytest.mark.parametrize("count", [0, 4, 50_000])
    def test_strings(self, models: Models, count: int) -> None:
        elements = np.array([b"\x00\xff", "grün".encode(), b"", b"plain"] * (count // 4) or [], dtype=np.object_)
        with models.running(IDENTITY) as process:
            (output,) = only(
                process.execute([python_request(inputs=[Tensor.from_numpy("A", elements, "BYTES")])])
            ).outputs
        assert output.datatype == "BYTES"
        assert output.to_numpy().tolist() == elements.tolist()

    def test_large_tensors_of_changing_sizes(self, models: Models) -> None:
        with models.running(IDENTITY) as process:
            for size in (500_000, 20_000, 3_000_000, 500_000):
                requests = [python_request(inputs=[numbers(1, size + extra)]) for extra in range(3)]
                for request, response in zip(requests, process.execute(requests), strict=True):
                    assert bytes(response.outputs[0].data) == bytes(request.inputs[0].data)

    def test_many_small_tensors_that_are_large_together(self, models: Models) -> None:
        with models.running(IDENTITY) as process:
            requests = [python_request(inputs=[numbers(1, 16_000)]) for _ in range(100)]
            responses = process.execute(requests)
        assert {bytes(response.outputs[0].data) for response in responses} == {bytes(requests[0].inputs[0].data)}

    @pytest.mark.parametrize("size", [16, 100_000])
    def test_inputs_are_the_models_own(self, models: Models, size: int) -> None:
        with models.running("""
            import triton_python_backend_utils as pb_utils

            class TritonPythonModel:
                def initialize(self, args):
                    self.kept = []

                def execute(self, requests):
                    for request in requests:
                        array = request.inputs()[0].as_numpy()
                        array[0, 0] += 1
                        self.kept.append(array)
                    sums = pb_utils.Tensor("SUM", sum(self.kept))
                    return [pb_utils.InferenceResponse([sums]) for _ in requests]
        """) as process:
            for value in (1, 10, 100):
                tensor = Tensor.from_numpy("A", np.full((1, size), value, np.float32), "FP32")
                response = only(process.execute([python_request(inputs=[tensor])]))
        first, *others = response.outputs[0].to_numpy().ravel().tolist()
        assert (first, set(others)) == (114.0, {111.0})
        assert set(tensor.to_numpy().ravel().tolist()) == {100.0}

    def test_content_that_does_not_fill_its_shape(self, models: Models) -> None:
        with models.running(IDENTITY) as process:
            error = error_of(process.execute([python_request(inputs=[Tensor("A", "FP32", [3], bytes(8))])]))
        assert error.code is ErrorCode.INTERNAL


class TestSharedMemoryInputs:
    @pytest.fixture
    def segment(self) -> Iterator[Path]:
        path = Path("/dev/shm") / f"weir-test-{uuid.uuid4().hex}"
        path.write_bytes(np.arange(100_000, dtype=np.float32).tobytes())
        yield path
        path.unlink(missing_ok=True)

    def test_are_read_where_they_lie(self, models: Models, segment: Path) -> None:
        reference = PayloadRef(segment.name, 0, 1, 4 * 1000, 4 * 50_000)
        with models.running(IDENTITY) as process:
            for _ in range(2):
                (output,) = only(
                    process.execute([python_request(inputs=[Tensor("A", "FP32", [50_000], reference)])])
                ).outputs
        assert output.to_numpy().tolist() == list(range(1000, 51_000))

    def test_are_not_changed_by_a_model(self, models: Models, segment: Path) -> None:
        before = segment.read_bytes()
        with models.running(
            execute_body("""
            for request in requests:
                request.inputs()[0].as_numpy()[:] = 7
            return [pb_utils.InferenceResponse() for _ in requests]
        """)
        ) as process:
            reference = PayloadRef(segment.name, 0, 1, 0, len(before))
            only(process.execute([python_request(inputs=[Tensor("A", "FP32", [100_000], reference)])]))
        assert segment.read_bytes() == before

    def test_a_recreated_segment_is_read_again(self, models: Models, segment: Path) -> None:
        reference = PayloadRef(segment.name, 0, 1, 0, 400_000)
        request = python_request(inputs=[Tensor("A", "FP32", [100_000], reference)])
        with models.running(IDENTITY) as process:
            only(process.execute([request]))
            segment.unlink()
            segment.write_bytes(bytes(400_000))
            (output,) = only(process.execute([request])).outputs
        assert not output.to_numpy().any()

    def test_a_bad_reference_costs_only_its_own_request(self, models: Models, segment: Path) -> None:
        bad = [
            PayloadRef("weir-not-there", 0, 1, 0, 400_000),
            PayloadRef("../etc/passwd", 0, 1, 0, 100),
            PayloadRef("other", 0, 1, 0, 100),
            PayloadRef(segment.name, 0, 1, 4, 400_000),
            PayloadRef(segment.name, 0, 1, -4, 400),
        ]
        inputs = [Tensor("A", "FP32", [1], reference) for reference in bad]
        with models.running(IDENTITY) as process:
            *failed, good = process.execute([python_request(inputs=[tensor]) for tensor in [*inputs, numbers(3)]])
            assert error_of(process.execute([python_request(inputs=[inputs[0]])])).code is ErrorCode.INTERNAL
        assert [response.error.code for response in failed if response.error] == [ErrorCode.INTERNAL] * len(bad)
        assert all("passwd" not in response.error.message for response in failed if response.error)
        assert good.error is None


class TestRequests:
    def test_every_field_of_a_request_reaches_the_model(self, models: Models) -> None:
        with models.running(
            execute_body("""
            (request,) = requests
            reported = [
                request.request_id(), request.correlation_id(), request.flags(), request.timeout(),
                json.loads(request.parameters()), request.requested_output_names(), request.is_cancelled(),
            ]
            return [pb_utils.InferenceResponse([pb_utils.Tensor("A", np.array([json.dumps(reported)]))])]
        """)
        ) as process:
            parameters = {"a": 1, "b": "x", "c": True, "d": 1.5}
            request = python_request("r1", outputs=["A"])
            request.correlation_id, request.sequence_flags, request.timeout_us = "seq", 3, 5000
            request.parameters = dict(parameters)
            response = only(process.execute([request]))
        assert json.loads(response.outputs[0].to_numpy()[0]) == ["r1", "seq", 3, 5000, parameters, ["A"], False]

    def test_only_requested_outputs_are_returned(self, models: Models) -> None:
        source = execute_body("""
            return [
                pb_utils.InferenceResponse([pb_utils.Tensor(name, np.zeros(1)) for name in "ABC"]) for _ in requests
            ]
        """)
        config = {"output": [{"name": "A"}, {"name": "B"}]}
        with models.running(source, config) as process:
            responses = process.execute(
                [python_request(outputs=["B"]), python_request(outputs=["X"]), python_request()]
            )
        assert [[tensor.name for tensor in response.outputs] for response in responses] == [["B"], [], ["A", "B"]]

    def test_response_parameters(self, models: Models) -> None:
        with models.running(
            execute_body("""
            return [pb_utils.InferenceResponse(parameters={"a": 1, "b": "x"}), pb_utils.InferenceResponse()]
        """)
        ) as process:
            first, second = process.execute([python_request(), python_request()])
        assert (first.parameters, second.parameters) == ({"a": 1, "b": "x"}, None)

    def test_a_model_sees_no_arguments(self, models: Models) -> None:
        with models.running(
            execute_body("""
            return [pb_utils.InferenceResponse([pb_utils.Tensor("A", np.array(sys.argv, dtype=object))])]
        """)
        ) as process:
            response = only(process.execute([python_request()]))
        assert response.outputs[0].to_numpy().tolist() == [b""]

    def test_async_execute_keeps_its_loop(self, models: Models) -> None:
        with models.running("""
            import asyncio
            import numpy as np
            import triton_python_backend_utils as pb_utils

            class TritonPythonModel:
                loop = None

                async def execute(self, requests):
                    await asyncio.sleep(0)
                    same = self.loop in (None, asyncio.get_running_loop())
                    self.loop = asyncio.get_running_loop()
                    return [pb_utils.InferenceResponse([pb_utils.Tensor("A", np.array([same]))]) for _ in requests]
        """) as process:
            for _ in range(2):
                assert only(process.execute([python_request()])).outputs[0].to_numpy().tolist() == [True]


class TestAutoComplete:
    def test_completes_a_configuration_and_ends(self, models: Models) -> None:
        folder = models.write("""
            class TritonPythonModel:
                @staticmethod
                def auto_complete_config(config):
                    config.add_input({"name": "A", "data_type": "TYPE_FP32", "dims": [3]})
                    config.set_max_batch_size(8)
                    config.set_dynamic_batching()
                    return config

                def execute(self, requests):
                    pass
        """)
        children_before = model_processes()
        assert auto_complete(ProcessSpec(folder, 1), {"name": "m"}) == {
            "name": "m",
            "max_batch_size": 8,
            "dynamic_batching": {},
            "input": [{"name": "A", "data_type": "TYPE_FP32", "dims": [3]}],
        }
        assert model_processes() == children_before

    def test_leaves_a_configuration_alone_without_the_function(self, models: Models) -> None:
        assert auto_complete(ProcessSpec(models.write(IDENTITY), 1), {"name": "m"}) == {"name": "m"}

    @pytest.mark.parametrize(
        "body,expected",
        [
            (
                "return {}",
                "auto_complete_config function in model 'm' must return a valid pb.ModelConfig object.",
            ),
            ("config.set_max_batch_size(2)", "configuration specified max_batch_size 4, but"),
        ],
    )
    def test_errors_name_the_mistake(self, models: Models, body: str, expected: str) -> None:
        folder = models.write(
            f"class TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(config):\n        {body}\n"
        )
        with pytest.raises(WeirError) as caught:
            auto_complete(ProcessSpec(folder, 1), {"name": "m", "max_batch_size": 4})
        assert expected in caught.value.message


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("class TritonPythonModel:\n    pass", False),
        ("import json\nfrom os import *\nclass TritonPythonModel:\n    pass", True),
        ("class TritonPythonModel:\n    def auto_complete_config(config): pass", True),
        ("class TritonPythonModel(Base):\n    pass", True),
        ("class TritonPythonModel(metaclass=Meta):\n    pass", True),
        ("@decorated\nclass TritonPythonModel:\n    pass", True),
        ("class TritonPythonModel:\n    pass\nTritonPythonModel = other", True),
        ("class TritonPythonModel:\n    pass\nfrom other import Model as TritonPythonModel", True),
        ("from other import TritonPythonModel", True),
        ("if True:\n    class TritonPythonModel:\n        pass", True),
        ("def (", True),
        ("\0", True),
    ],
)
def test_may_auto_complete(tmp_path: Path, source: str, expected: bool) -> None:
    path = tmp_path / "model.py"
    path.write_text(source)
    assert may_auto_complete(path) is expected


def test_a_missing_file_may_complete_its_configuration(tmp_path: Path) -> None:
    assert may_auto_complete(tmp_path / "model.py")

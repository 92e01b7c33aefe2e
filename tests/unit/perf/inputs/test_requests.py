"""Requests of a load test: each is what the model's own checks accept."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.perf.inputs import generated
from weir.perf.inputs.generated import MAX_SAMPLES, InputOptions
from weir.perf.inputs.model import InputError, has_text_ids, needs_correlation_id, read_model
from weir.perf.inputs.requests import make_requests
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.tensors import BY_CONFIG_NAME, DATATYPES
from weir.schemas.kserve.normalizer import RequestNormalizer


def model(*inputs: dict[str, object], max_batch_size: int = 0, **more: object) -> ModelConfig:
    return read_model({"name": "m", "max_batch_size": max_batch_size, "input": list(inputs), **more})


def one_input(datatype: str = "TYPE_FP32", dims: tuple[int, ...] = (2, 3), **more: object) -> dict[str, object]:
    return {"name": "IN", "data_type": datatype, "dims": list(dims), **more}


@pytest.mark.parametrize("datatype", BY_CONFIG_NAME)
@pytest.mark.parametrize("max_batch_size", [0, 8])
def test_generated_requests_pass_the_servers_checks(datatype: str, max_batch_size: int) -> None:
    config = model(one_input(datatype), max_batch_size=max_batch_size)
    batch = 3 if max_batch_size else 1
    requests = make_requests(config, InputOptions(batch_size=batch))
    assert len(requests) == MAX_SAMPLES
    normalizer = RequestNormalizer(config)
    for request in requests:
        normalizer.normalize(request)  # raises what a client would get
        (tensor,) = request.inputs
        assert request.batch_size == batch
        assert list(tensor.shape) == ([batch, 2, 3] if max_batch_size else [2, 3])
    contents = {bytes(request.inputs[0].data) for request in requests}  # type: ignore[arg-type]
    assert len(contents) > 1  # so that no cache answers for the model


@pytest.mark.parametrize("name", [name for name in DATATYPES if name != "BYTES"])
def test_generated_numbers_vary_and_are_small(name: str) -> None:
    config = model(one_input(DATATYPES[name].config_name, (500,)))
    (tensor,) = make_requests(config, InputOptions())[0].inputs
    values = tensor.to_numpy()
    if name == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    assert 0 <= float(values.min()) <= (5 if name == "UINT8" else 0.02)
    assert 0 < float(values.max()) <= (255 if name == "UINT8" else 1)


def test_generated_strings_are_letters_of_the_given_length() -> None:
    config = model(one_input("TYPE_STRING", (500,)))
    strings = make_requests(config, InputOptions(string_length=7))[0].inputs[0].to_numpy()
    assert {len(value) for value in strings} == {7}
    assert all(value.isalpha() and value.islower() for value in strings)
    assert len(set(strings)) == 500


def test_zeros_are_zeros() -> None:
    numbers, strings = one_input(), {"name": "TEXT", "data_type": "TYPE_STRING", "dims": [2]}
    (request,) = make_requests(model(numbers, strings), InputOptions(zeros=True))
    assert not request.inputs[0].to_numpy().any()
    assert request.inputs[1].to_numpy().tolist() == [b"", b""]


def test_equal_seeds_give_equal_content() -> None:
    contents = [
        bytes(make_requests(model(one_input()), InputOptions(seed=seed))[0].inputs[0].data)  # type: ignore[arg-type]
        for seed in (1, 1, 2)
    ]
    assert contents[0] == contents[1] != contents[2]


def test_large_inputs_are_generated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "MAX_GENERATED_BYTES", 64 << 10)
    requests = make_requests(model(one_input("TYPE_UINT8", (40 << 10,))), InputOptions())
    assert len(requests) == 1


def test_variable_dimensions_are_taken_from_the_options() -> None:
    config = model(one_input(dims=(-1, 3)), max_batch_size=4)
    with pytest.raises(InputError, match=r"variable dimensions \[-1, 3\].*--shape IN:1,3"):
        make_requests(config, InputOptions())
    request = make_requests(config, InputOptions(batch_size=2, shapes={"IN": (5, 3)}))[0]
    assert list(request.inputs[0].shape) == [2, 5, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (InputOptions(shapes={"IN": (5, 4)}), r"shape of input 'IN' must be \[-1, 3\], not \[5, 4\]"),
        (InputOptions(shapes={"IN": (5,)}), r"must be \[-1, 3\], not \[5\]"),
        (InputOptions(shapes={"OTHER": (5,)}), "no input 'OTHER'; its inputs are IN"),
        (InputOptions(batch_size=5, shapes={"IN": (1, 3)}), "may be at most 4, not 5"),
    ],
)
def test_options_that_do_not_fit_are_rejected(options: InputOptions, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_requests(model(one_input(dims=(-1, 3)), max_batch_size=4), options)


def test_a_model_without_batching_takes_batch_size_1() -> None:
    with pytest.raises(InputError, match="may be 1, because the model does not batch"):
        make_requests(model(one_input()), InputOptions(batch_size=2))


def test_optional_inputs_are_left_out_unless_they_are_named() -> None:
    needed, spare = one_input(), {"name": "MORE", "data_type": "TYPE_INT8", "dims": [1], "optional": True}
    config = model(needed, spare)
    assert [t.name for t in make_requests(config, InputOptions())[0].inputs] == ["IN"]
    assert [t.name for t in make_requests(config, InputOptions(shapes={"MORE": (1,)}))[0].inputs] == ["IN", "MORE"]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 8), st.sampled_from(list(BY_CONFIG_NAME)))
def test_any_shape_passes_the_servers_checks(dims: list[int], batch_size: int, datatype: str) -> None:
    config = model(one_input(datatype, (-1,) * len(dims)), max_batch_size=8)
    request = make_requests(config, InputOptions(batch_size=batch_size, shapes={"IN": tuple(dims)}))[0]
    RequestNormalizer(config).normalize(request)
    assert request.batch_size == batch_size


def test_sequences_are_recognised() -> None:
    corrid = {"kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_STRING"}
    batching = {"control_input": [{"name": "ID", "control": [corrid]}]}
    texts, numbers = model(one_input(), sequence_batching=batching), model(one_input(), sequence_batching={})
    assert has_text_ids(texts)
    assert not has_text_ids(numbers)
    assert needs_correlation_id(texts)
    assert not needs_correlation_id(model(one_input()))
    assert not needs_correlation_id(model(one_input(), sequence_batching={"iterative_sequence": True}))
    for config in (texts, numbers):
        assert make_requests(config, InputOptions())[0].correlation_id == 0  # each request gets that of its sequence


def test_fields_of_a_newer_server_are_ignored() -> None:
    config = {
        "name": "m",
        "max_batch_size": "8",  # a number as protobuf's JSON writes 64-bit ones
        "from_the_future": {"a": 1},
        "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": ["2"], "also_new": True}],
        "sequence_batching": {"new": 1, "oldest": {"max_candidate_sequences": 3, "newer": []}},
    }
    found = read_model(config)
    assert (found.max_batch_size, found.input[0].dims) == (8, [2])
    assert found.sequence_batching is not None
    assert found.sequence_batching.oldest is not None
    assert config["from_the_future"] == {"a": 1}  # the caller's object is left as it was


@pytest.mark.parametrize("config", [{"name": 3}, {"name": "m", "input": [{"name": "IN", "data_type": "TYPE_INVALID"}]}])
def test_what_is_no_configuration_is_rejected(config: dict[str, object]) -> None:
    with pytest.raises(InputError):
        read_model(config)


class TestFiles:
    """Requests from files."""

    def read(self, folder: Path, document: object, config: ModelConfig, **options: int) -> list[list[np.ndarray]]:
        (path := folder / "data.json").write_text(json.dumps(document))
        requests = make_requests(config, InputOptions(**options), path)  # type: ignore[arg-type]
        return [[tensor.to_numpy() for tensor in request.inputs] for request in requests]

    def test_a_kserve_request_is_sent_as_it_is(self, tmp_path: Path) -> None:
        document = {
            "parameters": {"own": 3},
            "inputs": [{"name": "IN", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}],
            "outputs": [{"name": "OUT", "parameters": {"classification": 2}}],
        }
        (path := tmp_path / "data.json").write_text(json.dumps(document))
        config = model(one_input(dims=(2,)), max_batch_size=4, output=[{"name": "OUT", "dims": [9]}])
        (request,) = make_requests(config, InputOptions(), path)
        assert request.inputs[0].to_numpy().tolist() == [[1, 2], [3, 4]]
        assert (request.batch_size, request.parameters, request.outputs[0].class_count) == (2, {"own": 3}, 2)

    def test_rows_for_perf_analyzer_become_batches(self, tmp_path: Path) -> None:
        rows = {"data": [{"IN": [1, 2]}, {"IN": {"content": [3, 4], "shape": [2]}}, {"IN": [[5, 6]]}]}
        config = model(one_input("TYPE_INT32", (2,)), max_batch_size=4)
        arrays = self.read(tmp_path, rows, config, batch_size=2)
        assert [one.tolist() for (one,) in arrays] == [[[1, 2], [3, 4]], [[5, 6], [1, 2]]]

    def test_lists_of_rows_are_read_in_order(self, tmp_path: Path) -> None:
        arrays = self.read(tmp_path, {"data": [[{"IN": [1]}, {"IN": [2]}], [{"IN": [3]}]]}, model(one_input(dims=(1,))))
        assert [one.tolist() for (one,) in arrays] == [[1], [2], [3]]

    def test_base64_is_the_content(self, tmp_path: Path) -> None:
        text = base64.b64encode(np.array([1.5, 2.5], np.float32).tobytes()).decode()
        assert self.read(tmp_path, {"data": [{"IN": {"b64": text}}]}, model(one_input(dims=(-1,))))[0][0].tolist() == [
            1.5,
            2.5,
        ]
        strings = model(one_input("TYPE_STRING", (1,)))
        picture = base64.b64encode(b"\x89PNG").decode()
        assert self.read(tmp_path, {"data": [{"IN": {"b64": picture}}]}, strings)[0][0].tolist() == [b"\x89PNG"]

    def test_a_variable_dimension_follows_from_the_content(self, tmp_path: Path) -> None:
        config = model(one_input("TYPE_STRING", (-1,)), max_batch_size=2)
        assert self.read(tmp_path, {"data": [{"IN": ["a", "b", "c"]}]}, config)[0][0].tolist() == [[b"a", b"b", b"c"]]

    @pytest.mark.parametrize(
        ("document", "message"),
        [
            ([1], "neither 'inputs'"),
            ({"data": []}, "'data' has 0 rows"),
            ({"data": [3]}, "row 0 of 'data' is not an object"),
            ({"data": [{"ELSE": [1]}]}, "row 0 of 'data' has 'ELSE'"),
            ({"data": [{"IN": [1, 2, 3]}]}, r"'IN' has 3 values, which do not fill the shape \[2\]"),
            ({"data": [{"IN": {"content": [1, 2], "shape": ["a"]}}]}, "must be a list of integers"),
            ({"data": [{"IN": {"b64": "!"}}]}, "'b64' in base64"),
            ({"data": [{"IN": ["a", "b"]}]}, "JSON non-number"),
            ({"inputs": [{"name": "IN"}]}, "data.json"),
            (
                {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [3], "data": [1, 2, 3]}]},
                "does not fit the model",
            ),
        ],
    )
    def test_what_does_not_fit_is_rejected(self, document: object, message: str, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=message):
            self.read(tmp_path, document, model(one_input(dims=(2,))))

    def test_rows_of_different_shapes_make_no_batch(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="different shapes of 'IN'"):
            self.read(
                tmp_path,
                {"data": [{"IN": [1]}, {"IN": [1, 2]}]},
                model(one_input(dims=(-1,)), max_batch_size=2),
                batch_size=2,
            )

    def test_files_that_cannot_be_read_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"missing\.json can't be read: No such file"):
            make_requests(model(one_input()), InputOptions(), tmp_path / "missing.json")
        (path := tmp_path / "broken.json").write_text("{")
        with pytest.raises(InputError, match=r"broken\.json is not JSON"):
            make_requests(model(one_input()), InputOptions(), path)

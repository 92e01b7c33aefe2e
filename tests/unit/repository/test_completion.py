import pytest

from weir.repository.completion import DescribedModel, DescribedTensor, complete, completed_fields, normalize
from weir.repository.problems import ConfigProblem
from weir.schemas.config.model_config import InstanceGroup, ModelConfig

X, Y = DescribedTensor("x", "TYPE_FP32", (-1, 3, -1)), DescribedTensor("y", "TYPE_INT64", (-1, 10))
BATCHING = DescribedModel([X], [Y])
FIXED = DescribedModel([DescribedTensor("x", "TYPE_FP32", (1, 3))], [DescribedTensor("y", "TYPE_INT64", (1, 10))])
FULL = {
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3, -1]}],
    "output": [{"name": "y", "data_type": "TYPE_INT64", "dims": [10]}],
}


def config(**fields):
    return ModelConfig.model_validate({"name": "net", "backend": "onnxruntime", **fields})


def test_instances_without_a_kind_are_on_gpus_only_if_the_backend_uses_them() -> None:
    groups = [InstanceGroup(), InstanceGroup(kind="KIND_GPU")]
    normal = normalize(config(instance_group=groups), [0, 1], backend_uses_gpus=False)
    assert [(group.kind, group.gpus) for group in normal.instance_group] == [("KIND_CPU", []), ("KIND_GPU", [0, 1])]


def test_no_configuration_becomes_a_batching_one():
    completed = complete(config(), BATCHING)
    assert completed == config(max_batch_size=4, dynamic_batching={}, **FULL)
    assert complete(config(), BATCHING, default_max_batch_size=16).max_batch_size == 16


def test_without_a_description_nothing_changes():
    assert complete(config(max_batch_size=8), None) == config(max_batch_size=8)


def test_a_fixed_first_dimension_is_no_batch():
    completed = complete(config(), FIXED)
    assert completed.max_batch_size == 0
    assert completed.dynamic_batching is None
    assert completed.input[0].dims == [1, 3]
    mixed = DescribedModel([X], [FIXED.outputs[0]])
    assert complete(config(), mixed).max_batch_size == 0


def test_a_default_batch_size_of_one_brings_no_batcher():
    completed = complete(config(), BATCHING, default_max_batch_size=1)
    assert completed.max_batch_size == 1
    assert completed.dynamic_batching is None


def test_whole_shapes_in_the_configuration_mean_no_batching():
    declared = [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 3, -1]}]
    completed = complete(config(input=declared), BATCHING)
    assert completed.max_batch_size == 0
    assert completed.output[0].dims == [-1, 10]


def test_a_configured_scheduler_is_kept():
    given = complete(config(max_batch_size=8, sequence_batching={"oldest": {}}), BATCHING)
    assert given.sequence_batching is not None
    assert given.dynamic_batching is None
    given = complete(config(max_batch_size=8, dynamic_batching={"max_queue_delay_microseconds": 5}), BATCHING)
    assert given.dynamic_batching.max_queue_delay_microseconds == 5


def test_completion_keeps_configured_values():
    second = DescribedTensor("x2", "TYPE_BOOL", (-1, 2))
    described = DescribedModel([X, second], [Y, DescribedTensor("z", "TYPE_FP32", (-1, 1))])
    completed = complete(
        config(
            max_batch_size=8, input=[{"name": "x2", "optional": True}], output=[{"name": "y", "label_filename": "l"}]
        ),
        described,
    )
    assert [tensor.name for tensor in completed.input] == ["x2", "x"]
    assert completed.input[0].optional
    assert (completed.input[0].data_type, completed.input[0].dims) == ("TYPE_BOOL", [2])
    assert completed.output == [completed.output_by_name["y"]], "outputs may be left out"
    assert (completed.output[0].label_filename, completed.output[0].dims) == ("l", [10])


def test_scalars_are_one_element_to_clients():
    completed = complete(config(), DescribedModel([DescribedTensor("x", "TYPE_FP32", (-1,))], [Y]))
    assert completed.input[0].dims == [1]
    assert completed.input[0].reshape.shape == []
    alone = complete(config(), DescribedModel([DescribedTensor("x", "TYPE_FP32", ())], [Y]))
    assert alone.max_batch_size == 0
    assert alone.input[0].reshape.shape == []


def test_tensors_that_the_server_supplies_are_not_declared():
    sequences = {
        "control_input": [{"name": "start", "control": [{"int32_false_true": [0, 1]}]}],
        "state": [{"input_name": "s_in", "output_name": "s_out", "data_type": "TYPE_FP32", "dims": [2]}],
    }
    names = ["x", "start", "s_in", "lengths"]
    described = DescribedModel(
        [DescribedTensor(name, "TYPE_FP32", (-1, 2)) for name in names],
        [DescribedTensor(name, "TYPE_FP32", (-1, 2)) for name in ("y", "s_out")],
    )
    completed = complete(
        config(max_batch_size=4, sequence_batching=sequences, batch_input=[{"target_name": ["lengths"]}]), described
    )
    assert list(completed.input_by_name) == ["x"]
    assert list(completed.output_by_name) == ["y"]


def test_reshape_and_ragged_inputs_are_compared_as_the_model_sees_them():
    reshaped = [{"name": "x", "data_type": "TYPE_FP32", "dims": [1, 3, -1], "reshape": {"shape": [3, -1]}}]
    assert complete(config(max_batch_size=8, input=reshaped), BATCHING).input[0].dims == [1, 3, -1]
    ragged = DescribedModel([DescribedTensor("x", "TYPE_FP32", (-1,))], [Y])
    given = [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 7], "allow_ragged_batch": True}]
    assert complete(config(max_batch_size=8, input=given), ragged).input[0].dims == [-1, 7]


def test_tensors_of_a_whole_batch_have_no_batch_dimension():
    described = DescribedModel(
        [DescribedTensor("x", "TYPE_FP32", (-1,)), DescribedTensor("longest", "TYPE_FP32", (5,))],
        [DescribedTensor("y", "TYPE_FP32", (-1,))],
    )
    completed = complete(
        config(
            max_batch_size=8,
            input=[{"name": "x", "allow_ragged_batch": True}],
            batch_input=[{"target_name": ["longest"], "source_input": ["x"]}],
            batch_output=[{"target_name": ["y"], "source_input": ["x"]}],
        ),
        described,
    )
    assert [(tensor.name, tensor.dims) for tensor in completed.input] == [("x", [-1])]
    assert [(tensor.name, tensor.dims) for tensor in completed.output] == [("y", [-1])]


def test_an_input_with_a_default_is_optional_where_declared():
    described = DescribedModel([X], [Y], [DescribedTensor("w", "TYPE_FP32", (-1, 2))])
    assert list(complete(config(max_batch_size=8), described).input_by_name) == ["x"]
    declared = complete(config(max_batch_size=8, input=[{"name": "w", "optional": True}]), described)
    assert [(tensor.name, tensor.dims, tensor.optional) for tensor in declared.input] == [
        ("w", [2], True),
        ("x", list(X.dims[1:]), False),
    ]


@pytest.mark.parametrize(
    "fields, described, field, text",
    [
        ({"input": [{"name": "w"}]}, BATCHING, "input[0].name", "unexpected inference input 'w'"),
        ({"output": [{"name": "y"}, {"name": "w"}]}, BATCHING, "output[1].name", "unexpected inference output 'w'"),
        ({"input": [{"name": "x", "data_type": "TYPE_FP64"}]}, BATCHING, "input[0].data_type", "tensor 'x'"),
        (
            {"max_batch_size": 8, "input": [{"name": "x", "dims": [4, -1]}]},
            BATCHING,
            "input[0].dims",
            "the batch dimension): dimension 1 is 4, the model's is 3",
        ),
        ({"max_batch_size": 8, "input": [{"name": "x", "dims": [-1, 3, -1]}]}, BATCHING, "input[0].dims", "tensor 'x'"),
        ({"max_batch_size": 8, "output": [{"name": "y", "dims": [-1]}]}, BATCHING, "output[0].dims", "tensor 'y'"),
        ({"input": [{"name": "x", "dims": [3]}]}, FIXED, "input[0].dims", "tensor 'x'"),
        ({"max_batch_size": 8}, FIXED, "max_batch_size", "tensor 'x'"),
    ],
)
def test_a_configuration_that_differs_from_the_model_names_the_tensor(fields, described, field, text):
    with pytest.raises(ConfigProblem) as caught:
        complete(config(**fields), described)
    assert caught.value.field == field
    assert text in caught.value.message
    assert "net" in caught.value.message


def test_defaults_are_written_out():
    normal = normalize(config(max_batch_size=8, dynamic_batching={}), [])
    assert normal.version_policy.latest.num_versions == 1
    assert normal.dynamic_batching.preferred_batch_size == [8]
    assert normal.optimization.input_pinned_memory.enable
    assert normal.optimization.output_pinned_memory.enable
    assert [(group.name, group.kind, group.count, group.gpus) for group in normal.instance_group] == [
        ("net", "KIND_CPU", 2, [])
    ]
    assert normalize(normal, []) == normal


def test_configured_values_are_kept():
    written = config(
        max_batch_size=8,
        version_policy={"all": {}},
        dynamic_batching={"preferred_batch_size": [2]},
        optimization={"input_pinned_memory": {}, "graph": {"level": 1}},
        instance_group=[{"name": "g", "kind": "KIND_CPU", "count": 3}],
    )
    normal = normalize(written, [0])
    assert normal.version_policy.all is not None
    assert normal.dynamic_batching.preferred_batch_size == [2]
    assert not normal.optimization.input_pinned_memory.enable
    assert normal.optimization.graph.level == 1
    assert normal.instance_group == written.instance_group


@pytest.mark.parametrize(
    "backend, group, gpu_ids, expected",
    [
        ("onnxruntime", {}, [], ("net_0", "KIND_CPU", 2, [])),
        ("onnxruntime", {"kind": "KIND_CPU"}, [0], ("net_0", "KIND_CPU", 2, [])),
        ("onnxruntime", {"count": 1}, [], ("net_0", "KIND_CPU", 1, [])),
        ("onnxruntime", {}, [0, 1], ("net_0", "KIND_GPU", 1, [0, 1])),
        ("python", {}, [], ("net_0", "KIND_CPU", 1, [])),
        ("python", {"kind": "KIND_GPU", "count": 2}, [0, 1], ("net_0", "KIND_GPU", 2, [0, 1])),
        ("python", {"gpus": [1]}, [0, 1], ("net_0", "KIND_GPU", 1, [1])),
        ("python", {"gpus": [1]}, [0], ("net_0", "KIND_CPU", 1, [1])),
        ("python", {"name": "g", "kind": "KIND_MODEL"}, [0], ("g", "KIND_MODEL", 1, [])),
        ("python", {"count": -1}, [], ("net_0", "KIND_CPU", 1, [])),
    ],
)
def test_instance_groups(backend, group, gpu_ids, expected):
    normal = normalize(ModelConfig(name="net", backend=backend, instance_group=[group]), gpu_ids)
    assert [(one.name, one.kind, one.count, one.gpus) for one in normal.instance_group] == [expected]


def test_sequences_get_their_defaults():
    normal = normalize(config(max_batch_size=8, sequence_batching={"oldest": {}}), [])
    assert normal.sequence_batching.max_sequence_idle_microseconds == 1_000_000
    assert normal.sequence_batching.oldest.preferred_batch_size == [8]
    direct = normalize(config(sequence_batching={"direct": {}, "max_sequence_idle_microseconds": 7}), [])
    assert direct.sequence_batching.max_sequence_idle_microseconds == 7


def test_ensembles_have_no_instances():
    normal = normalize(ModelConfig(name="net", platform="ensemble", ensemble_scheduling={}), [0])
    assert normal.instance_group == []
    assert normal.optimization is None


def test_completed_fields_are_those_that_the_author_left_out_or_wrote_in_part() -> None:
    written = ModelConfig(name="net", max_batch_size=8, backend="onnxruntime")
    served = written.replace(
        name="other", platform="onnxruntime_onnx", max_batch_size=8, default_model_filename="model.onnx"
    )
    assert completed_fields(written, served) == ["platform", "default_model_filename"]
    assert completed_fields(served, served) == []


@pytest.mark.parametrize(("limit", "expected"), [(None, 4), (2, 2), (64, 4)])
def test_a_completed_batch_is_one_that_the_model_takes(limit: int | None, expected: int) -> None:
    assert complete(config(), DescribedModel([X], [Y], largest_batch=limit)).max_batch_size == expected

import pytest

from weir.repository.completion import normalize
from weir.repository.problems import ConfigProblem
from weir.repository.validation import validate
from weir.schemas.config.model_config import ModelConfig

X = {"name": "x", "data_type": "TYPE_FP32", "dims": [3]}
Y = {"name": "y", "data_type": "TYPE_FP32", "dims": [3]}


def config(**fields):
    return ModelConfig.model_validate(
        {"name": "net", "backend": "python", "max_batch_size": 8, "input": [X], "output": [Y], **fields}
    )


def tensor(**fields):
    return {"input": [{**X, **fields}]}


def dynamic(**fields):
    return {"dynamic_batching": fields}


def control(**fields):
    return {"sequence_batching": {"control_input": [{"name": "c", "control": [fields]}]}}


def initial(**fields):
    return state(initial_state=[{"name": "z", "data_type": "TYPE_FP32", "dims": [2], "zero_data": True, **fields}])


def state(**fields):
    given = {"input_name": "i", "output_name": "o", "data_type": "TYPE_FP32", "dims": [2], **fields}
    return {"sequence_batching": {"state": [given]}}


def step(inputs, outputs, model="m"):
    return {"model_name": model, "input_map": inputs, "output_map": outputs}


def metrics(control: dict[str, object]) -> dict[str, object]:
    return {"model_metrics": {"metric_control": [control]}}


def ensemble(*steps, **fields):
    return {"backend": "", "platform": "ensemble", "ensemble_scheduling": {"step": list(steps)}, **fields}


BATCH_INPUT = {"data_type": "TYPE_INT32", "target_name": ["n"], "source_input": ["x"]}
WARMUP_INPUT = {"data_type": "TYPE_FP32", "dims": [3], "zero_data": True}


def warmup(**fields):
    return {"model_warmup": [{"batch_size": 1, "inputs": {"x": {**WARMUP_INPUT, **fields}}}]}


DELAY = {"timeout_action": "DELAY", "default_timeout_microseconds": 1}
VALID = [
    {},
    {"max_batch_size": 0},
    {"backend": "onnxruntime", "platform": "onnxruntime_onnx"},
    {"backend": "mine", "platform": "whatever"},
    tensor(dims=[-1, 4], reshape={"shape": [-1, 2, 2]}),
    tensor(dims=[1], reshape={"shape": []}),
    tensor(dims=[3, 2, 2], format="FORMAT_NCHW"),
    tensor(allow_ragged_batch=True),
    {"backend": "tensorrt", "platform": "tensorrt_plan", **tensor(is_shape_tensor=True)},
    dynamic(preferred_batch_size=[8, 4]),
    {"max_batch_size": 0, **dynamic()},
    dynamic(priority_levels=2, default_priority_level=2, priority_queue_policy={1: {"timeout_action": "DELAY"}}),
    dynamic(priority_queue_policy={0: {}, 7: {"max_queue_size": 1}}),
    dynamic(preserve_ordering=True, priority_levels=1, default_priority_level=1),
    dynamic(preserve_ordering=True, default_queue_policy={"timeout_action": "DELAY", "allow_timeout_override": True}),
    control(kind="CONTROL_SEQUENCE_READY", bool_false_true=[False, True]),
    control(kind="CONTROL_SEQUENCE_CORRID", data_type="TYPE_STRING"),
    state(dims=[-1], initial_state=[{"name": "z", "data_type": "TYPE_FP32", "dims": [1], "zero_data": True}]),
    {"sequence_batching": {"direct": {"minimum_slot_utilization": 1.0}}},
    {"sequence_batching": {"oldest": {"preferred_batch_size": [8]}}},
    {"batch_input": [BATCH_INPUT], "batch_output": [{"target_name": ["y"], "source_input": ["x"]}]},
    {"instance_group": [{"kind": "KIND_GPU", "gpus": [1]}, {"kind": "KIND_MODEL"}]},
    {"response_cache": {"enable": True}},
    {"model_warmup": [{"batch_size": 8, "inputs": {"x": WARMUP_INPUT}}]},
    {"model_warmup": [{"inputs": {"x": {"dims": [-1]}}}]},  # a batch size of 0 is passed over
    warmup(dims=[0], zero_data=False),
    ensemble(step({"a": "t"}, {"b": "y"}), step({"a": "x"}, {"b": "t"})),
    ensemble(step({"a": "x"}, {"b": "y"}), response_cache={"enable": True}),
]

# (what the configuration says, the field, a part of the text)
INVALID = [
    (
        {"backend": "tensorrt", "platform": "onnxruntime_onnx"},
        "backend",
        "unexpected 'platform' and 'backend' pair, got:onnxruntime_onnx, tensorrt",
    ),
    (
        {"platform": "ensemble"},
        "backend",
        "Ensemble model 'net' must have platform type 'ensemble' and empty backend type",
    ),
    ({"backend": ""}, "platform", "unexpected platform type '' for net"),
    ({"backend": "", "platform": "caffe"}, "platform", "unexpected platform type 'caffe' for net"),
    ({"max_batch_size": -1}, "max_batch_size", "'max_batch_size' must be non-negative value for net"),
    ({"runtime": "../libevil.so"}, "runtime", "must stay within the model's folder"),
    ({"default_model_filename": "/etc/passwd"}, "default_model_filename", "must stay within"),
    ({"cc_model_filenames": {"8.0": "../m"}}, "cc_model_filenames", "must stay within"),
    ({"output": [{**Y, "label_filename": "../../labels"}]}, "output[0].label_filename", "must stay within"),
    ({"model_operations": {"op_library_filename": ["/lib/x.so"]}}, "model_operations.op_library_filename", "must stay"),
    ({"model_warmup": [{"inputs": {"x": {"input_data_file": "../x"}}}]}, "model_warmup[0].inputs", "must stay within"),
    (state(initial_state=[{"data_file": "../x"}]), "sequence_batching.state[0].initial_state", "must stay within"),
    ({"input": [X, X]}, "input[1].name", "model input 'x' is given twice"),
    (tensor(name=""), "input[0].name", "model input must specify 'name'"),
    (tensor(data_type="TYPE_INVALID"), "input[0].data_type", "must specify 'data_type'"),
    (tensor(dims=[]), "input[0].dims", "must specify 'dims'"),
    (tensor(dims=[3, 0]), "input[0].dims", "must be integer >= 1, or -1"),
    (tensor(dims=[-2]), "input[0].dims", "must be integer >= 1, or -1"),
    ({"output": [{**Y, "dims": [0]}]}, "output[0].dims", "model output 'y' dimension must be integer >= 1"),
    (tensor(format="FORMAT_NHWC"), "input[0].format", "model input NHWC/NCHW require 3 dims"),
    (tensor(reshape={"shape": [2]}), "input[0].reshape", "has different size for dims and reshape"),
    (tensor(reshape={"shape": [0]}), "input[0].reshape", "must be integer >= 1, or -1"),
    (tensor(dims=[-1, 4], reshape={"shape": [-1]}), "input[0].reshape", "has different size for dims and reshape"),
    (
        tensor(dims=[-1, 2], reshape={"shape": [4]}),
        "input[0].reshape",
        "has different size for dims and reshape for net",
    ),
    (
        tensor(dims=[2, 2], reshape={"shape": [-1]}),
        "input[0].reshape",
        "has different size for dims and reshape for net",
    ),
    (
        tensor(dims=[-1, -1], reshape={"shape": [-1]}),
        "input[0].reshape",
        "has different number of variable-size dimensions for dims and reshape for net",
    ),
    (
        tensor(is_shape_tensor=True),
        "input[0].is_shape_tensor",
        "shape tensors are only supported for TensorRT platform for net",
    ),
    ({"max_batch_size": 0, **tensor(allow_ragged_batch=True)}, "input[0].allow_ragged_batch", "can't be ragged"),
    (
        {"batch_input": [{**BATCH_INPUT, "data_type": "TYPE_INT8"}]},
        "batch_input[0].data_type",
        "TYPE_INT32 or TYPE_FP32",
    ),
    (
        {"batch_input": [{**BATCH_INPUT, "source_input": []}]},
        "batch_input[0].source_input",
        "expects 1 source input, got 0 for net",
    ),
    (
        {"batch_input": [{**BATCH_INPUT, "source_input": ["z"]}]},
        "batch_input[0].source_input",
        "unknown source input name 'z'",
    ),
    ({"batch_input": [{**BATCH_INPUT, "target_name": []}]}, "batch_input[0].target_name", "must specify 'target_name'"),
    (
        {"batch_output": [{"target_name": ["y"]}]},
        "batch_output[0].source_input",
        "expects 1 source input, got 0 for net",
    ),
    ({"batch_output": [{"target_name": ["z"], "source_input": ["x"]}]}, "batch_output[0].target_name", "'z'"),
    (
        {"batch_output": [{"target_name": ["y", "y"], "source_input": ["x"]}]},
        "batch_output[0].target_name",
        "target output name 'y' can only be specified once for net",
    ),
    (
        dynamic(preferred_batch_size=[9]),
        "dynamic_batching.preferred_batch_size",
        "dynamic batching preferred size must be <= max batch size for net",
    ),
    (
        dynamic(preferred_batch_size=[0]),
        "dynamic_batching.preferred_batch_size",
        "dynamic batching preferred size must be positive",
    ),
    (
        dynamic(priority_levels=2),
        "dynamic_batching.default_priority_level",
        "default priority level must be in range [1, 2] for net",
    ),
    (dynamic(priority_levels=2, default_priority_level=3), "dynamic_batching.default_priority_level", "[1, 2]"),
    (
        dynamic(priority_levels=2, default_priority_level=1, priority_queue_policy={3: {}}),
        "dynamic_batching.priority_queue_policy",
        "priority queue policy must have priority level in range [1, 2] for net",
    ),
    (
        dynamic(preserve_ordering=True, priority_levels=2, default_priority_level=1),
        "dynamic_batching.priority_levels",
        "Only one priority level is allowed when 'preserve_ordering' is true for net",
    ),
    (
        dynamic(preserve_ordering=True, default_queue_policy=DELAY),
        "dynamic_batching.default_queue_policy",
        "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for net",
    ),
    (
        dynamic(
            preserve_ordering=True,
            priority_levels=1,
            default_priority_level=1,
            priority_queue_policy={1: DELAY},
        ),
        "dynamic_batching.priority_queue_policy",
        "DELAY",
    ),
    (
        {"sequence_batching": {"direct": {"minimum_slot_utilization": 1.5}}},
        "sequence_batching.direct.minimum_slot_utilization",
        "sequence batching minimum slot utilization must be in range (0.0, 1.0] for net",
    ),
    (
        {"sequence_batching": {"direct": {"minimum_slot_utilization": float("nan")}}},
        "sequence_batching.direct.minimum_slot_utilization",
        "(0.0, 1.0]",
    ),
    (
        {"sequence_batching": {"oldest": {"preferred_batch_size": [9]}}},
        "sequence_batching.oldest.preferred_batch_size",
        "sequence batching preferred batch size must be <= max batch size for net",
    ),
    (
        {"sequence_batching": {"oldest": {"max_candidate_sequences": -1}}},
        "sequence_batching.oldest.max_candidate_sequences",
        "non-negative",
    ),
    (
        {"sequence_batching": {"control_input": [{"control": [{}]}]}},
        "sequence_batching.control_input[0]",
        "must have a name",
    ),
    (
        {"sequence_batching": {"control_input": [{"name": "c"}]}},
        "sequence_batching.control_input[0]",
        "must have 1 control",
    ),
    (
        control(int32_false_true=[0, 1, 2]),
        "sequence_batching.control_input[0].control[0].int32_false_true",
        "sequence batching control 'int32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_START for net",
    ),
    (
        control(int32_false_true=[0, 1], fp32_false_true=[0, 1]),
        "sequence_batching.control_input[0].control[0]",
        "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and 'bool_false_true' for "
        "CONTROL_SEQUENCE_START for net",
    ),
    (
        control(),
        "sequence_batching.control_input[0].control[0]",
        "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
        "CONTROL_SEQUENCE_START for net",
    ),
    (
        control(kind="CONTROL_SEQUENCE_CORRID"),
        "sequence_batching.control_input[0].control[0].data_type",
        "unexpected data type for control CONTROL_SEQUENCE_CORRID for net. Allowed data types are TYPE_UINT64, TYPE_INT64, "
        "TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
    ),
    (
        control(kind="CONTROL_SEQUENCE_CORRID", int32_false_true=[0, 1]),
        "sequence_batching.control_input[0].control[0]",
        "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
        "CONTROL_SEQUENCE_CORRID for net",
    ),
    (
        {
            "sequence_batching": {
                "control_input": [
                    {"name": "c", "control": [{"kind": kind, "int32_false_true": [0, 1]}]}
                    for kind in ("CONTROL_SEQUENCE_START", "CONTROL_SEQUENCE_READY")
                ]
            }
        },
        "sequence_batching.control_input[1]",
        "sequence batching control tensor 'c' is specified for multiple control kinds for net",
    ),
    (
        {
            "sequence_batching": {
                "control_input": [{"name": name, "control": [{"int32_false_true": [0, 1]}]} for name in "ab"]
            }
        },
        "sequence_batching.control_input[1].control[0].kind",
        "multiple CONTROL_SEQUENCE_START",
    ),
    (state(output_name=""), "sequence_batching.state[0]", "'output_name'"),
    (state(data_type="TYPE_INVALID"), "sequence_batching.state[0].data_type", "'data_type'"),
    (state(dims=[0]), "sequence_batching.state[0].dims", ">= 1 or -1"),
    (state(initial_state=[{}, {}]), "sequence_batching.state[0].initial_state", "at most 1"),
    (
        initial(dims=[-1]),
        "sequence_batching.state[0].initial_state",
        "state input name 'i' contains variable dimensions.",
    ),
    (initial(data_type="TYPE_INT8"), "sequence_batching.state[0].initial_state", "does not match the state data type"),
    (initial(name=""), "sequence_batching.state[0].initial_state", "Field 'name' must be set when using initial_state"),
    (initial(dims=[2, 1]), "sequence_batching.state[0].initial_state", "for state input 'i'. 2 != 1"),
    (initial(dims=[3]), "sequence_batching.state[0].initial_state", "doesn't match 'state' dim description. 3 != 2"),
    (
        initial(zero_data=None),
        "sequence_batching.state[0].initial_state",
        "expects state'i' to have initial_state data",
    ),
    (
        {**state(), "parameters": {"weir_checkpoint_every": {"string_value": "0"}}},
        'parameters["weir_checkpoint_every"]',
        "in range [1, 1000]",
    ),
    (
        {"parameters": {"weir_queue_max_age_secs": {"string_value": "0"}}},
        'parameters["weir_queue_max_age_secs"]',
        "model 'net': parameter 'weir_queue_max_age_secs' must be a whole number above 0, got '0'",
    ),
    (
        {"parameters": {"weir_memory_bytes": {"string_value": "4 GB"}}},
        'parameters["weir_memory_bytes"]',
        "model 'net': parameter 'weir_memory_bytes' must be a whole number, got '4 GB'",
    ),
    (
        {"sequence_batching": {}, "parameters": {"weir_checkpoint_every": {"string_value": "1"}}},
        'parameters["weir_checkpoint_every"]',
        "needs implicit states",
    ),
    (metrics({}), "model_metrics.metric_control[0]", "metric control must specify 'metric_identifier'"),
    *(
        (
            metrics({"metric_identifier": identifier, "histogram_options": {"buckets": [1, 2]}}),
            "model_metrics.metric_control[0].metric_identifier.family",
            "metric identifier must specify non-empty 'family'",
        )
        for identifier in ({}, {"family": ""})
    ),
    (
        metrics({"metric_identifier": {"family": "f"}}),
        "model_metrics.metric_control[0]",
        "metric control must specify 'histogram_options'",
    ),
    *(
        (
            metrics({"metric_identifier": {"family": "f"}, "histogram_options": options}),
            "model_metrics.metric_control[0].histogram_options.buckets",
            "histogram options must specify non-empty 'buckets'",
        )
        for options in ({}, {"buckets": []})
    ),
    *(
        (
            metrics({"metric_identifier": {"family": "f"}, "histogram_options": {"buckets": buckets}}),
            "model_metrics.metric_control[0].histogram_options.buckets",
            "histogram options must specify at most 256 'buckets', each of them a number",
        )
        for buckets in ([1.0, float("nan")], [float(bound) for bound in range(257)])
    ),
    ({"backend": "", "platform": "ensemble"}, "platform", "ensemble scheduling must be set for ensemble net"),
    ({"ensemble_scheduling": {}}, "ensemble_scheduling", "cannot be set for model 'net'"),
    (ensemble(), "ensemble_scheduling", "must specify 'step' for ensemble 'net'"),
    (
        ensemble(*[step({"a": "x"}, {"b": "y"})] * 1001),
        "ensemble_scheduling",
        "ensemble 'net' has 1001 steps, at most 1000 are allowed",
    ),
    (
        ensemble(step({"a": "x"}, {"b": "y"}, "")),
        "ensemble_scheduling.step[0].model_name",
        "must specify 'model_name' in step 0 of ensemble 'net'",
    ),
    (ensemble(step({}, {"b": "y"})), "ensemble_scheduling.step[0].input_map", "must specify 'input_map'"),
    (ensemble(step({"a": "x"}, {})), "ensemble_scheduling.step[0].output_map", "must specify 'output_map'"),
    (ensemble(step({"a": "x"}, {"b": "z"})), "output[0].name", "ensemble output 'y' for ensemble net' is not used"),
    (
        ensemble(step({"a": "x"}, {"b": "y", "c": "y"})),
        "ensemble_scheduling.step[0].output_map",
        "ensemble tensor 'y' can appear in an output map only once for ensemble 'net' step 0",
    ),
    (ensemble(step({"a": "x"}, {"b": "x"})), "ensemble_scheduling.step[0].output_map", "'x' can appear"),
    (ensemble(step({"a": "w"}, {"b": "y"})), "input[0].name", "ensemble input 'x' for ensemble net' is not used"),
    (
        ensemble(step({"a": "x"}, {"b": "y", "c": "z"})),
        "ensemble_scheduling.step[0].output_map",
        "ensemble tensor 'z' is unused in ensemble 'net'",
    ),
    (
        ensemble(step({"a": "t", "d": "x"}, {"b": "u"}), step({"a": "u"}, {"b": "t", "c": "y"})),
        "output[0].name",
        "output 'y' for ensemble 'net' is not written: at least one of its depending tensors, 't', is not connected",
    ),
    (
        ensemble(step({"a": "w", "c": "x"}, {"b": "y"})),
        "output[0].name",
        "output 'y' for ensemble 'net' is not written: at least one of its depending tensors, 'w', is not connected",
    ),
    (
        ensemble(step({"a": "x"}, {"b": "t"}), step({"a": "y"}, {"b": "u"})),
        "output[0].name",
        "output 'y' for ensemble 'net' is not written",
    ),
    (
        ensemble(step({"a": "x"}, {"b": "y"}), step({"a": "w"}, {"b": "u"})),
        "ensemble_scheduling.step[1].output_map",
        "ensemble tensor 'u' is unused in ensemble 'net'",
    ),
    (
        ensemble(step({"a": "x"}, {"b": "y"}), optimization={}),
        "optimization",
        "optimization should not be specified for ensemble 'net'",
    ),
    (
        ensemble(step({"a": "x"}, {"b": "y"}), instance_group=[{}]),
        "instance_group",
        "should not be specified for ensemble 'net'",
    ),
    (
        {"instance_group": [{"kind": "KIND_GPU", "gpus": [2]}]},
        "instance_group[0].gpus",
        "instance group net_0 of model net specifies invalid or unsupported gpu id 2. GPUs with at least the minimum "
        "required CUDA compute compatibility of 6.000000 are: 0, 1",
    ),
    (
        {"instance_group": [{"kind": "KIND_CPU", "profile": ["0"]}]},
        "instance_group[0].profile",
        "instance group net_0 of model net and platform specifies profile field which is only supported for TensorRT",
    ),
    (
        {"instance_group": [{"kind": "KIND_CPU", "gpus": [0]}]},
        "instance_group[0].gpus",
        "instance group net_0 of model net has kind KIND_CPU but specifies one or more GPUs",
    ),
    (
        {"response_cache": {"enable": True}, "sequence_batching": {}},
        "response_cache",
        "Response Cache does not currently support model net with sequence batching scheduler. "
        "Please disable the response cache.",
    ),
    (
        {"response_cache": {"enable": True}, "model_transaction_policy": {"decoupled": True}},
        "response_cache",
        "with 'decoupled' transaction policy. Please disable the response cache.",
    ),
    ({"model_warmup": [{"batch_size": 9}]}, "model_warmup[0].batch_size", "batch size 9"),
    (
        ensemble(step({"a": "x"}, {"b": "y"}), model_warmup=[{}]),
        "model_warmup",
        "model_warmup can not be specified for ensemble 'net'",
    ),
    (warmup(data_type="TYPE_INVALID"), "model_warmup[0].inputs", "'data_type'"),
    (
        warmup(dims=[-1]),
        "model_warmup[0].inputs",
        "warmup setting expects all variable-size dimensions are specified for input 'x'",
    ),
    (
        warmup(zero_data=None),
        "model_warmup[0].inputs",
        "warmup setting expects input 'x' to have input_data_type set",
    ),
]


@pytest.mark.parametrize("fields", VALID, ids=str)
def test_valid_configurations(fields):
    validate(normalize(config(**fields), [0, 1]), [0, 1])


@pytest.mark.parametrize("fields, field, text", INVALID, ids=[f"{row[1]}: {row[2]}" for row in INVALID])
def test_invalid_configurations(fields, field, text):
    with pytest.raises(ConfigProblem) as caught:
        validate(normalize(config(**fields), [0, 1]), [0, 1])
    assert caught.value.field == field
    assert text in caught.value.message


def test_gpu_instances_need_a_gpu():
    with pytest.raises(
        ConfigProblem,
        match=r"^INVALID_ARG: instance group net_0 of model net has kind KIND_GPU but no GPUs are available$",
    ):
        validate(normalize(config(instance_group=[{"kind": "KIND_GPU"}]), []), [])

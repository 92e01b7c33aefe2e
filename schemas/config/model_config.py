"""`ModelConfig`: the configuration of a model (`config.pbtxt`), as a value that every role can read.

Each class mirrors the message of Triton's `model_config.proto` (as shipped in `tritonclient`) named in its docstring, with
the same field names, proto3's defaults, `None` for an absent message or oneof member, and enum values by name. So a
configuration passes unchanged between text, protobuf, JSON, MessagePack and Python. Durations are microseconds.

`weir.repository.config_text` reads text, JSON and protobuf; `weir.repository.validation` checks the values.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, model_validator

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
UInt32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
UInt64 = Annotated[int, Field(ge=0, le=2**64 - 1)]

DataType = Literal[
    "TYPE_INVALID",
    "TYPE_BOOL",
    "TYPE_UINT8",
    "TYPE_UINT16",
    "TYPE_UINT32",
    "TYPE_UINT64",
    "TYPE_INT8",
    "TYPE_INT16",
    "TYPE_INT32",
    "TYPE_INT64",
    "TYPE_FP16",
    "TYPE_FP32",
    "TYPE_FP64",
    "TYPE_STRING",
    "TYPE_BF16",
]
"""Element types by their names in `config.pbtxt`; `weir.schemas.core.tensors.BY_CONFIG_NAME` maps them to wire names."""


class ConfigMessage(BaseModel):
    """A protobuf message as an immutable value. An unknown field raises pydantic's `ValidationError`.

    `model_dump(exclude_defaults=True)` is the compact form for messages between roles; `model_validate` takes it back.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, serialize_by_alias=True)

    def replace(self, **changes: Any) -> Self:
        """A validated copy with the given fields changed.

        Use it instead of `model_copy(update=...)`, which neither validates nor forgets cached properties.
        """
        kept = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self).model_validate(kept | changes)


def check_oneof(message: ConfigMessage, names: Iterable[str]) -> None:
    """Raises ValueError when more than one of the fields `names`, a protobuf oneof, is set."""
    chosen = [name for name in names if getattr(message, name) is not None]
    if len(chosen) > 1:
        raise ValueError(f"only one of {', '.join(chosen)} may be given")


class QueuePolicy(ConfigMessage):
    """`ModelQueuePolicy`: bounds of one queue. 0 is no time limit and no size limit."""

    timeout_action: Literal["REJECT", "DELAY"] = "REJECT"
    default_timeout_microseconds: UInt64 = 0
    allow_timeout_override: bool = False
    max_queue_size: UInt32 = 0


PriorityLevel = Annotated[UInt64, PlainSerializer(str, return_type=str)]
"""A map key that is dumped as text, which JSON requires and msgpack's strict reader expects."""


class DynamicBatching(ConfigMessage):
    """`ModelDynamicBatching`. Priority 1 is the highest; `priority_levels` 0 is no priorities."""

    preferred_batch_size: list[Int32] = []
    max_queue_delay_microseconds: UInt64 = 0
    preserve_ordering: bool = False
    priority_levels: UInt64 = 0
    default_priority_level: UInt64 = 0
    default_queue_policy: QueuePolicy | None = None
    priority_queue_policy: dict[PriorityLevel, QueuePolicy] = {}


ControlKind = Literal[
    "CONTROL_SEQUENCE_START", "CONTROL_SEQUENCE_READY", "CONTROL_SEQUENCE_END", "CONTROL_SEQUENCE_CORRID"
]


class SequenceControl(ConfigMessage):
    """`ModelSequenceBatching.Control`: one signal and the pair of values (false, true) that carries it.

    CONTROL_SEQUENCE_CORRID uses `data_type` instead of a pair.
    """

    kind: ControlKind = "CONTROL_SEQUENCE_START"
    int32_false_true: list[Int32] = []
    fp32_false_true: list[float] = []
    bool_false_true: list[bool] = []
    data_type: DataType = "TYPE_INVALID"


class SequenceControlInput(ConfigMessage):
    """`ModelSequenceBatching.ControlInput`: a model input, not listed under `input`, that carries control signals."""

    name: str = ""
    control: list[SequenceControl] = []


class InitialState(ConfigMessage):
    """`ModelSequenceBatching.InitialState`: the first value of a state; `data_file` lies in `initial_state/`."""

    data_type: DataType = "TYPE_INVALID"
    dims: list[Int64] = []
    zero_data: bool | None = None
    data_file: str | None = None
    name: str = ""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        check_oneof(self, ("zero_data", "data_file"))
        return self


class SequenceState(ConfigMessage):
    """`ModelSequenceBatching.State`: an output of one request that is an input of the sequence's next."""

    input_name: str = ""
    output_name: str = ""
    data_type: DataType = "TYPE_INVALID"
    dims: list[Int64] = []
    initial_state: list[InitialState] = []
    use_same_buffer_for_input_output: bool = False
    use_growable_memory: bool = False


class StrategyDirect(ConfigMessage):
    """`ModelSequenceBatching.StrategyDirect`: each sequence keeps one batch row of one instance."""

    max_queue_delay_microseconds: UInt64 = 0
    minimum_slot_utilization: float = 0.0


class StrategyOldest(ConfigMessage):
    """`ModelSequenceBatching.StrategyOldest`: the oldest requests of an instance's sequences form batches."""

    max_candidate_sequences: Int32 = 0
    preferred_batch_size: list[Int32] = []
    max_queue_delay_microseconds: UInt64 = 0
    preserve_ordering: bool = False


class SequenceBatching(ConfigMessage):
    """`ModelSequenceBatching`. With neither strategy given, `direct` holds."""

    direct: StrategyDirect | None = None
    oldest: StrategyOldest | None = None
    max_sequence_idle_microseconds: UInt64 = 0
    control_input: list[SequenceControlInput] = []
    state: list[SequenceState] = []
    iterative_sequence: bool = False

    @model_validator(mode="after")
    def _one_strategy(self) -> Self:
        check_oneof(self, ("direct", "oldest"))
        return self


class EnsembleStep(ConfigMessage):
    """`ModelEnsembling.Step`: one composing model; maps go from the model's tensor to the ensemble's.

    `model_version` -1 is the latest.
    """

    model_name: str = ""
    model_version: Int64 = 0
    input_map: dict[str, str] = {}
    output_map: dict[str, str] = {}
    model_namespace: str = ""


class EnsembleScheduling(ConfigMessage):
    """`ModelEnsembling`: steps run as soon as their inputs exist. `max_inflight_requests` 0 is no limit."""

    step: list[EnsembleStep] = []
    max_inflight_requests: UInt32 = 0


class RateLimiterResource(ConfigMessage):
    """`ModelRateLimiter.Resource`; `global_` is the field `global` of the proto."""

    name: str = ""
    global_: bool = Field(default=False, alias="global")
    count: UInt32 = 0


class ModelRateLimiter(ConfigMessage):
    """`ModelRateLimiter`."""

    resources: list[RateLimiterResource] = []
    priority: UInt32 = 0


class SecondaryDevice(ConfigMessage):
    """`ModelInstanceGroup.SecondaryDevice`."""

    kind: Literal["KIND_NVDLA"] = "KIND_NVDLA"
    device_id: Int64 = 0


class InstanceGroup(ConfigMessage):
    """`ModelInstanceGroup`: `count` instances, on each of `gpus` where the kind is KIND_GPU."""

    name: str = ""
    kind: Literal["KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"] = "KIND_AUTO"
    count: Int32 = 0
    rate_limiter: ModelRateLimiter | None = None
    gpus: list[Int32] = []
    secondary_devices: list[SecondaryDevice] = []
    profile: list[str] = []
    passive: bool = False
    host_policy: str = ""


class GraphOptimization(ConfigMessage):
    """`ModelOptimizationPolicy.Graph`."""

    level: Int32 = 0


class GraphShape(ConfigMessage):
    """`ModelOptimizationPolicy.Cuda.GraphSpec.Shape`."""

    dim: list[Int64] = []


class GraphLowerBound(ConfigMessage):
    """`ModelOptimizationPolicy.Cuda.GraphSpec.LowerBound`."""

    batch_size: Int32 = 0
    input: dict[str, GraphShape] = {}


class GraphSpec(ConfigMessage):
    """`ModelOptimizationPolicy.Cuda.GraphSpec`."""

    batch_size: Int32 = 0
    input: dict[str, GraphShape] = {}
    graph_lower_bound: GraphLowerBound | None = None


class CudaOptimization(ConfigMessage):
    """`ModelOptimizationPolicy.Cuda`."""

    graphs: bool = False
    busy_wait_events: bool = False
    graph_spec: list[GraphSpec] = []
    output_copy_stream: bool = False


class Accelerator(ConfigMessage):
    """`ModelOptimizationPolicy.ExecutionAccelerators.Accelerator`."""

    name: str = ""
    parameters: dict[str, str] = {}


class ExecutionAccelerators(ConfigMessage):
    """`ModelOptimizationPolicy.ExecutionAccelerators`: in order of preference."""

    gpu_execution_accelerator: list[Accelerator] = []
    cpu_execution_accelerator: list[Accelerator] = []


class PinnedMemoryBuffer(ConfigMessage):
    """`ModelOptimizationPolicy.PinnedMemoryBuffer`."""

    enable: bool = False


class OptimizationPolicy(ConfigMessage):
    """`ModelOptimizationPolicy`."""

    graph: GraphOptimization | None = None
    priority: Literal["PRIORITY_DEFAULT", "PRIORITY_MAX", "PRIORITY_MIN"] = "PRIORITY_DEFAULT"
    cuda: CudaOptimization | None = None
    execution_accelerators: ExecutionAccelerators | None = None
    input_pinned_memory: PinnedMemoryBuffer | None = None
    output_pinned_memory: PinnedMemoryBuffer | None = None
    gather_kernel_buffer_threshold: UInt32 = 0
    eager_batching: bool = False


_MAX_WAIT_DIGITS = 12

CHECKPOINT_EVERY = "weir_checkpoint_every"
"""The parameter for checkpoints of sequence states; Triton's configuration has no field for it."""

MAX_QUEUE_WAIT = "weir_max_queue_wait_us"
"""The parameter for the longest expected wait of live requests; those that would wait longer are rejected on arrival."""


class Reshape(ConfigMessage):
    """`ModelTensorReshape`: the shape the model itself sees, without the batch dimension; [] is a scalar."""

    shape: list[Int64] = []


class ModelInput(ConfigMessage):
    """`ModelInput`. `dims` leave out the batch dimension when `max_batch_size` > 0; -1 is any size."""

    name: str = ""
    data_type: DataType = "TYPE_INVALID"
    format: Literal["FORMAT_NONE", "FORMAT_NHWC", "FORMAT_NCHW"] = "FORMAT_NONE"
    dims: list[Int64] = []
    reshape: Reshape | None = None
    is_shape_tensor: bool = False
    allow_ragged_batch: bool = False
    optional: bool = False
    is_non_linear_format_io: bool = False


class ModelOutput(ConfigMessage):
    """`ModelOutput`. `dims` as in `ModelInput`; `label_filename` is relative to the model's folder."""

    name: str = ""
    data_type: DataType = "TYPE_INVALID"
    dims: list[Int64] = []
    reshape: Reshape | None = None
    label_filename: str = ""
    is_shape_tensor: bool = False
    is_non_linear_format_io: bool = False


class BatchInput(ConfigMessage):
    """`BatchInput`: an input computed from the batch, never sent by clients."""

    kind: Literal[
        "BATCH_ELEMENT_COUNT",
        "BATCH_ACCUMULATED_ELEMENT_COUNT",
        "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
        "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
        "BATCH_ITEM_SHAPE",
        "BATCH_ITEM_SHAPE_FLATTEN",
    ] = "BATCH_ELEMENT_COUNT"
    target_name: list[str] = []
    data_type: DataType = "TYPE_INVALID"
    source_input: list[str] = []


class BatchOutput(ConfigMessage):
    """`BatchOutput`: outputs that are split by the shape of each request's `source_input`."""

    target_name: list[str] = []
    kind: Literal["BATCH_SCATTER_WITH_INPUT_SHAPE"] = "BATCH_SCATTER_WITH_INPUT_SHAPE"
    source_input: list[str] = []


class LatestVersions(ConfigMessage):
    """`ModelVersionPolicy.Latest`: the highest `num_versions` versions; 0 counts as 1."""

    num_versions: UInt32 = 0


class AllVersions(ConfigMessage):
    """`ModelVersionPolicy.All`: every version in the folder."""


class SpecificVersions(ConfigMessage):
    """`ModelVersionPolicy.Specific`: these versions, where they exist."""

    versions: list[Int64] = []


class VersionPolicy(ConfigMessage):
    """`ModelVersionPolicy`: which versions are served."""

    latest: LatestVersions | None = None
    all: AllVersions | None = None
    specific: SpecificVersions | None = None

    @model_validator(mode="after")
    def _one_policy(self) -> Self:
        check_oneof(self, ("latest", "all", "specific"))
        return self


class ModelParameter(ConfigMessage):
    """`ModelParameter`: a setting handed to the backend as text."""

    string_value: str = ""


class WarmupInput(ConfigMessage):
    """`ModelWarmup.Input`: where a warm-up tensor's content comes from; `input_data_file` lies in `warmup/`."""

    data_type: DataType = "TYPE_INVALID"
    dims: list[Int64] = []
    zero_data: bool | None = None
    random_data: bool | None = None
    input_data_file: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        check_oneof(self, ("zero_data", "random_data", "input_data_file"))
        return self


class ModelWarmup(ConfigMessage):
    """`ModelWarmup`: a request run `count` times (0 counts as 1) before the model is ready; batch size 0 is none."""

    name: str = ""
    batch_size: UInt32 = 0
    inputs: dict[str, WarmupInput] = {}
    count: UInt32 = 0


class ModelOperations(ConfigMessage):
    """`ModelOperations`."""

    op_library_filename: list[str] = []


class TransactionPolicy(ConfigMessage):
    """`ModelTransactionPolicy`: whether a request may have any number of responses."""

    decoupled: bool = False


class RepositoryAgent(ConfigMessage):
    """`ModelRepositoryAgents.Agent`."""

    name: str = ""
    parameters: dict[str, str] = {}


class RepositoryAgents(ConfigMessage):
    """`ModelRepositoryAgents`."""

    agents: list[RepositoryAgent] = []


class ModelResponseCache(ConfigMessage):
    """`ModelResponseCache`."""

    enable: bool = False


class MetricIdentifier(ConfigMessage):
    """`ModelMetrics.MetricControl.MetricIdentifier`."""

    family: str = ""


class HistogramOptions(ConfigMessage):
    """`ModelMetrics.MetricControl.HistogramOptions`: upper bounds in the metric's unit."""

    buckets: list[float] = []


class MetricControl(ConfigMessage):
    """`ModelMetrics.MetricControl`."""

    metric_identifier: MetricIdentifier | None = None
    histogram_options: HistogramOptions | None = None


class ModelMetrics(ConfigMessage):
    """`ModelMetrics`."""

    metric_control: list[MetricControl] = []


class ModelConfig(ConfigMessage):
    """`ModelConfig`: the configuration of one model. At most one of the three schedulers is set."""

    name: str = ""
    platform: str = ""
    backend: str = ""
    runtime: str = ""
    version_policy: VersionPolicy | None = None
    max_batch_size: Int32 = 0
    input: list[ModelInput] = []
    output: list[ModelOutput] = []
    batch_input: list[BatchInput] = []
    batch_output: list[BatchOutput] = []
    optimization: OptimizationPolicy | None = None
    dynamic_batching: DynamicBatching | None = None
    sequence_batching: SequenceBatching | None = None
    ensemble_scheduling: EnsembleScheduling | None = None
    instance_group: list[InstanceGroup] = []
    default_model_filename: str = ""
    cc_model_filenames: dict[str, str] = {}
    metric_tags: dict[str, str] = {}
    parameters: dict[str, ModelParameter] = {}
    model_warmup: list[ModelWarmup] = []
    model_operations: ModelOperations | None = None
    model_transaction_policy: TransactionPolicy | None = None
    model_repository_agents: RepositoryAgents | None = None
    response_cache: ModelResponseCache | None = None
    model_metrics: ModelMetrics | None = None

    @model_validator(mode="after")
    def _one_scheduler(self) -> Self:
        check_oneof(self, ("dynamic_batching", "sequence_batching", "ensemble_scheduling"))
        return self

    @cached_property
    def input_by_name(self) -> dict[str, ModelInput]:
        """The declared inputs by name."""
        return {tensor.name: tensor for tensor in self.input}

    @cached_property
    def output_by_name(self) -> dict[str, ModelOutput]:
        """The declared outputs by name."""
        return {tensor.name: tensor for tensor in self.output}

    @property
    def is_decoupled(self) -> bool:
        """Whether a request may have any number of responses."""
        return self.model_transaction_policy is not None and self.model_transaction_policy.decoupled

    @property
    def is_ensemble(self) -> bool:
        """Whether the model is a chain of other models."""
        return self.platform == "ensemble" or self.ensemble_scheduling is not None

    @property
    def has_optional_inputs(self) -> bool:
        """Whether a request may leave out an input."""
        return any(tensor.optional for tensor in self.input)

    @property
    def caches_responses(self) -> bool:
        """Whether responses may come from the response cache."""
        return self.response_cache is not None and self.response_cache.enable

    @property
    def checkpoint_every(self) -> int:
        """After how many requests the state of a sequence is checkpointed, 0 for never: `weir_checkpoint_every`."""
        text = self.parameter(CHECKPOINT_EVERY)
        return int(text) if text.isascii() and text.isdigit() else 0

    @property
    def max_queue_wait_us(self) -> int | None:
        """`weir_max_queue_wait_us`: the longest expected wait of live requests, 0 for no bound; None if it is not set."""
        text = self.parameter(MAX_QUEUE_WAIT)
        return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_WAIT_DIGITS else None

    def parameter(self, name: str, default: str = "") -> str:
        """The text of a backend parameter."""
        found = self.parameters.get(name)
        return default if found is None else found.string_value

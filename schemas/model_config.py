"""`ModelConfig`: what `config.pbtxt` says of a model, as a value every role can read.

Each class mirrors the message of Triton's `model_config.proto` (as shipped in `tritonclient`) named in its docstring,
with the same field names; what concerns queues is in `scheduling_config`, devices in `execution_config`. Reading text,
JSON and protobuf is the work of `repository.config_text`; whether the values make sense together is that of
`repository.validation`.
"""

# ruff: noqa: RUF012 -- pydantic copies mutable defaults for every instance.

from __future__ import annotations

from functools import cached_property
from typing import Literal, Self

from pydantic import model_validator

from schemas.config_message import ConfigMessage, DataType, Int32, Int64, UInt32, check_oneof
from schemas.execution_config import InstanceGroup, OptimizationPolicy
from schemas.scheduling_config import DynamicBatching, EnsembleScheduling, SequenceBatching

_MAX_WAIT_DIGITS = 12

CHECKPOINT_EVERY = "weir_checkpoint_every"
"""The parameter that has the states of sequences checkpointed; Triton's configuration has no field for it."""

MAX_QUEUE_WAIT = "weir_max_queue_wait_us"
"""The parameter that says how long live requests are to wait at most; what would wait for longer is refused as it comes."""


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
    """`ModelTransactionPolicy`: whether a request may have any number of answers."""

    decoupled: bool = False


class RepositoryAgent(ConfigMessage):
    """`ModelRepositoryAgents.Agent`."""

    name: str = ""
    parameters: dict[str, str] = {}


class RepositoryAgents(ConfigMessage):
    """`ModelRepositoryAgents`."""

    agents: list[RepositoryAgent] = []


class ResponseCache(ConfigMessage):
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
    """`ModelConfig`: everything a repository says about one model. At most one of the three schedulers is set."""

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
    response_cache: ResponseCache | None = None
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
        """Whether a request may have any number of answers."""
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
        """Whether answers may come from the response cache."""
        return self.response_cache is not None and self.response_cache.enable

    @property
    def checkpoint_every(self) -> int:
        """After how many requests the state of a sequence is checkpointed, 0 for never: `weir_checkpoint_every`."""
        text = self.parameter(CHECKPOINT_EVERY)
        return int(text) if text.isascii() and text.isdigit() else 0

    @property
    def max_queue_wait_us(self) -> int | None:
        """`weir_max_queue_wait_us`: how long live requests are to wait at most, 0 for ever; None where that isn't said."""
        text = self.parameter(MAX_QUEUE_WAIT)
        return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_WAIT_DIGITS else None

    def parameter(self, name: str, default: str = "") -> str:
        """The text of a backend parameter."""
        found = self.parameters.get(name)
        return default if found is None else found.string_value

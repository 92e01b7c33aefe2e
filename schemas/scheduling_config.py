"""The part of a model's configuration that says how requests are queued, batched and chained.

Each class mirrors the message of Triton's `model_config.proto` (as shipped in `tritonclient`) named in its docstring.
Durations are microseconds.
"""

# ruff: noqa: RUF012 -- pydantic copies mutable defaults for every instance.

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import PlainSerializer, model_validator

from schemas.config_message import ConfigMessage, DataType, Int32, Int64, UInt32, UInt64, check_oneof


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

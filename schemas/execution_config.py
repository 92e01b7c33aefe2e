"""The part of a model's configuration that says how it runs: instances, their devices, and optimisation.

Each class mirrors the message of Triton's `model_config.proto` (as shipped in `tritonclient`) named in its docstring.
"""

# ruff: noqa: RUF012 -- pydantic copies mutable defaults for every instance.

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schemas.config_message import ConfigMessage, Int32, Int64, UInt32


class RateLimiterResource(ConfigMessage):
    """`ModelRateLimiter.Resource`; `global_` is the field `global` of the proto."""

    name: str = ""
    global_: bool = Field(default=False, alias="global")
    count: UInt32 = 0


class RateLimiter(ConfigMessage):
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
    rate_limiter: RateLimiter | None = None
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

"""`ModelEnvironment`: what all models of one worker share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from bus.sequence_states import SequenceStates
from telemetry.metrics_config import MetricsConfig
from worker.backend import ProcessCalls
from worker.batch_execution import FinishedBatch
from worker.client_memory import ClientMemoryAccess
from worker.devices import CPU_ONLY, WorkerDevices
from worker.ensembles.backend import EnsembleBackend
from worker.execution_turns import ExecutionTurns
from worker.gpu_memory import GpuMemory
from worker.host_policy import NO_POLICIES, HostPolicies


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEnvironment:
    """See the module. `arena_prefix` is unique to the worker. `on_finished` gets what leaves instances, in any thread.

    `metrics` says what is observed of models beyond what is always counted, `client_memory` what they may do with memory
    that clients share, `turns` when instances may execute (None: always). `checkpoints` is where the states of sequences
    are kept for other workers, `ensembles` makes models of other models, and `process_calls` is how processes of models
    ask other models; without these nobody does. `host_policies` say where on the host instances run. `on_health_change`
    gets the identity of a model of which instances have gone for a while, or have come back, in any thread.

    `on_device_lost` is called, in an instance's thread, when nothing can run on the GPUs of this process any more, once:
    with the reason, and with the end of the batch that was lost, if there is one, which is then its to tell. `device_lost`
    is set from then on.
    """

    arena_prefix: str
    on_finished: Callable[[FinishedBatch], None]
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    client_memory: ClientMemoryAccess = field(default_factory=ClientMemoryAccess)
    turns: ExecutionTurns | None = None
    checkpoints: SequenceStates | None = None
    ensembles: EnsembleBackend | None = None
    process_calls: ProcessCalls | None = None
    devices: WorkerDevices = CPU_ONLY
    gpu_memory: GpuMemory = field(default_factory=GpuMemory)
    on_device_lost: Callable[[str, FinishedBatch | None], None] | None = None
    device_lost: threading.Event = field(default_factory=threading.Event)
    host_policies: HostPolicies = NO_POLICIES
    on_health_change: Callable[[str], None] = lambda identity: None

"""Options of Triton's that tune what Weir has no counterpart of: accepted, so that command lines need no change."""

from __future__ import annotations

import math

from weir.options.forms import device_pair
from weir.options.option import Option
from weir.options.values import Checked, Integer, Number, Switch, Text, Value

_PANEL = "Accepted without effect"

_EVENT_LOOPS = "the gateway answers from one event loop, without threads for requests"
_NO_POOL = "requests are not kept in pools"
_NO_CUDA_POOL = "backends allocate device memory themselves"
_NO_SAGEMAKER = "it counts only with --allow-sagemaker=true, which is refused"
_NO_VERTEX = "it counts only with --allow-vertex-ai=true, which is refused"

_THREADS = Integer(2, 128, "invalid argument for --grpc_infer_thread_count. Must be in the range 2 to 128.")
_RESPONSES = Integer(1, math.inf, "Error: --grpc-max-response-pool-size must be greater than 0.")
_DEVICE_BYTES = Checked("DEVICE:BYTES", device_pair)

_ROWS: tuple[tuple[str, Value, bool, str], ...] = (
    ("--http-thread-count", Integer(), False, _EVENT_LOOPS),
    ("--grpc-infer-thread-count", _THREADS, False, _EVENT_LOOPS),
    ("--grpc-infer-allocation-pool-size", Integer(), False, _NO_POOL),
    ("--grpc-max-response-pool-size", _RESPONSES, False, _NO_POOL),
    ("--cuda-memory-pool-byte-size", _DEVICE_BYTES, True, _NO_CUDA_POOL),
    ("--cuda-virtual-address-size", _DEVICE_BYTES, True, _NO_CUDA_POOL),
    ("--buffer-manager-thread-count", Integer(), False, "tensors are copied by the threads of instances"),
    ("--enable-peer-access", Switch(), False, "tensors are not copied from one GPU to another"),
    ("--min-supported-compute-capability", Number(), False, "backends themselves know which GPUs they can use"),
    ("--sagemaker-port", Integer(), False, _NO_SAGEMAKER),
    ("--sagemaker-safe-port-range", Text("PORT-PORT"), False, _NO_SAGEMAKER),
    ("--sagemaker-thread-count", Integer(), False, _NO_SAGEMAKER),
    ("--vertex-ai-port", Integer(), False, _NO_VERTEX),
    ("--vertex-ai-thread-count", Integer(), False, _NO_VERTEX),
    ("--vertex-ai-default-model", Text("NAME"), False, _NO_VERTEX),
)
"""(name, value, whether it may be repeated, why it has no effect)."""

INEFFECTIVE: tuple[Option, ...] = tuple(
    Option(
        names=(name,),
        value=value,
        repeatable=repeatable,
        bare="true" if isinstance(value, Switch) else None,
        help=f"No effect: {why}.",
        ineffective=why,
        panel=_PANEL,
    )
    for name, value, repeatable, why in _ROWS
)

"""Triton's options without a counterpart in Weir, and options of Weir that were removed.

`INEFFECTIVE` options only tune Triton's implementation and are accepted without effect, so that command lines need no
change. `REFUSED` options would change what the server does and are rejected, except for values that equal the default.
`REMOVED` options are rejected with what to use instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from weir.options.option import SCHEDULER, SERVE, Option
from weir.options.values import Checked, Integer, Number, Switch, Text, Value, device_pair

_REFUSED_PANEL = "Refused"


def _never(value: Any) -> bool:
    return False


_REFUSED_ROWS: tuple[tuple[str, Value, Callable[[Any], bool], str], ...] = (
    (
        "--cache-directory",
        Text("FOLDER"),
        _never,
        "Triton's cache implementations are shared libraries, which Weir can't load; --cache-config selects local or nats",
    ),
)
"""(name, value type, test for values that are accepted, why other values are rejected)."""

REFUSED: tuple[Option, ...] = tuple(
    Option(
        names=(name,),
        value=value,
        bare="true" if isinstance(value, Switch) else None,
        help=f"{'Rejected' if harmless is _never else 'Only false is accepted'}: {why}.",
        refused=why,
        harmless=harmless,
        panel=_REFUSED_PANEL,
    )
    for name, value, harmless, why in _REFUSED_ROWS
)

_NO_EVENT_LOG = "event logs were removed; --log-verbose=1 logs which batch each request is in"

REMOVED: tuple[Option, ...] = (
    Option(
        names=("--event-log",),
        value=Text("FOLDER"),
        help=f"Rejected: {_NO_EVENT_LOG}.",
        refused=_NO_EVENT_LOG,
        panel=_REFUSED_PANEL,
        commands=(SERVE, SCHEDULER),
        ours=True,
    ),
)


_PANEL = "Accepted without effect"

_EVENT_LOOPS = (
    "a gateway serves requests from one event loop, without request threads; --gateways starts several gateways"
)
_NO_POOL = "requests and responses are not pooled; --gateway-memory-byte-size bounds their memory"
_NO_CUDA_POOL = "backends allocate device memory themselves"

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
    ("--buffer-manager-thread-count", Integer(), False, "instance threads copy the tensors"),
    ("--enable-peer-access", Switch(), False, "tensors are not copied from one GPU to another"),
    (
        "--min-supported-compute-capability",
        Number(),
        False,
        "each backend checks which GPUs it can use; CUDA_VISIBLE_DEVICES excludes others",
    ),
    ("--sagemaker-thread-count", Integer(), False, _EVENT_LOOPS),
    ("--vertex-ai-thread-count", Integer(), False, _EVENT_LOOPS),
)
"""(name, value type, whether it may be repeated, why it has no effect)."""

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

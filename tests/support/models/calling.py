"""The models for the tests of calls between models, and the requests to them."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.clients.stock import http_inputs
from tests.support.models.zoo import write_python_model
from tests.support.servers.weir_server import Server

MODELS = ("script", "same", "relay", "repeat", "until_cancelled", "sum")
OPTIONAL = """
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] optional: true },
       { name: "WORDS" data_type: TYPE_STRING dims: [-1] optional: true }]
output [{ name: "IN_OUT" data_type: TYPE_FP32 dims: [-1] }, { name: "WORDS_OUT" data_type: TYPE_STRING dims: [-1] }]
"""
SEQUENCES = """
sequence_batching { max_sequence_idle_microseconds: 60000000 control_input [
  { name: "START" control [{ kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }] },
  { name: "END" control [{ kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1] }] },
  { name: "READY" control [{ kind: CONTROL_SEQUENCE_READY int32_false_true: [0, 1] }] },
  { name: "CORRID" control [{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }] }] }
"""


def write_models(root: Path) -> None:
    """`spare` is there to be loaded."""
    decoupled = "model_transaction_policy { decoupled: true }"
    two = "instance_group [{ count: 2 kind: KIND_CPU }]"
    write_python_model(root, "script", "scripted", {"SCRIPT": ("BYTES", [1])}, {"TOLD": ("BYTES", [1])}, 0, two)
    write_python_model(root, "same", "identity", {}, {}, 0, OPTIONAL)
    for name in ("relay", "spare"):
        write_python_model(root, name, "forward", {"IN": ("FP32", [-1])}, {"IN_OUT": ("FP32", [-1])})
    write_python_model(
        root,
        "repeat",
        "repeat",
        {"IN": ("INT32", [-1]), "DELAY": ("UINT32", [-1]), "WAIT": ("UINT32", [1])},
        {"OUT": ("INT32", [1]), "IDX": ("UINT32", [1])},
        0,
        decoupled,
    )
    write_python_model(
        root, "until_cancelled", "until_cancelled", {"MORE": ("INT32", [1])}, {"OUT": ("INT32", [1])}, 0, decoupled
    )
    write_python_model(
        root,
        "sum",
        "accumulate",
        {"INPUT": ("INT32", [1])},
        {"OUTPUT": ("INT32", [1]), "INSTANCE": ("BYTES", [1])},
        4,
        SEQUENCES,
    )


def run(server: Server, script: str) -> Any:
    """What the script returned in model `script`; the text of what it raised."""
    source = np.array([textwrap.dedent(script)], np.object_)
    with server.http() as client:
        reply = client.infer("script", http_inputs({"SCRIPT": source})).as_numpy("TOLD")[0].decode()
    try:
        return ast.literal_eval(reply)
    except (SyntaxError, ValueError):
        return reply

"""The models of the fault suite, whose correct outputs are known to the clients, and single durable requests to them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import nats
from nats.js.errors import NotFoundError

from weir.bus.naming.durable_subjects import RESULT_STREAM, event, result
from weir.options.api_key import authorization

DIGEST = "digest"
"""SHA-256 of some bytes, as that of `benchmarks.durable`, but that a batch takes some milliseconds."""

TOTAL = "total"
"""A sequence model: the sum of the inputs since the start of the sequence."""

COUNTED = "counted"
"""A decoupled model: as many responses as the input says, numbered from 0."""

FRAIL = "frail"
"""Echoes bytes in batches of up to 32; certain inputs make it crash, hang or fail."""

_DIGEST_CODE = """
import hashlib
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.004)
        responses = []
        for request in requests:
            files = pb_utils.get_input_tensor_by_name(request, "DATA").as_numpy()
            rows = [[hashlib.sha256(file).hexdigest().encode()] for file in files.reshape(-1)]
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SHA256", np.array(rows, np.object_))]))
        return responses
"""
_DIGEST = """
backend: "python" max_batch_size: 16
input { name: "DATA" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "SHA256" data_type: TYPE_STRING dims: [ 1 ] }
dynamic_batching { } instance_group { kind: KIND_CPU count: 1 }
"""
_TOTAL_CODE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.totals = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        value, start, id = (pb_utils.get_input_tensor_by_name(request, name).as_numpy().item()
                            for name in ("IN", "START", "ID"))
        self.totals[id] = value if start else self.totals[id] + value
        total = np.array([[self.totals[id]]], np.int64)
        return pb_utils.InferenceResponse([pb_utils.Tensor("TOTAL", total)])
"""
_TOTAL = """
backend: "python" max_batch_size: 8
input { name: "IN" data_type: TYPE_INT64 dims: [ 1 ] }
output { name: "TOTAL" data_type: TYPE_INT64 dims: [ 1 ] }
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
  oldest { max_candidate_sequences: 64 }
}
instance_group { kind: KIND_CPU count: 1 }
"""
_COUNTED_CODE = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            wanted = pb_utils.get_input_tensor_by_name(request, "N").as_numpy().item()
            for number in range(wanted):
                tensor = pb_utils.Tensor("NUMBER", np.array([number], np.int32))
                flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if number == wanted - 1 else 0
                sender.send(pb_utils.InferenceResponse([tensor]), flags=flags)
                time.sleep(0.001)
"""
_COUNTED = """
backend: "python" max_batch_size: 0
input { name: "N" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "NUMBER" data_type: TYPE_INT32 dims: [ 1 ] }
model_transaction_policy { decoupled: true }
instance_group { kind: KIND_CPU count: 1 }
"""
_FRAIL_CODE = """
import ctypes
import os
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "DATA").as_numpy()) for request in requests]

    def answer(self, data):
        word = data.reshape(-1)[0]
        if word == b"exit":
            os._exit(3)
        if word == b"raise":
            raise ValueError("asked to raise")
        while word == b"loop":
            pass
        if word == b"block":
            ctypes.PyDLL(None).sleep(3600)  # with the interpreter's lock held
        if word == b"eat":
            eaten = []
            while len(eaten) < 128:  # 1 GiB: no more, where nobody ends it
                eaten.append(b"x" * (8 << 20))
                time.sleep(0.01)
        return pb_utils.InferenceResponse([pb_utils.Tensor("ECHO", data)])
"""
_FRAIL = """
backend: "python" max_batch_size: 32
input { name: "DATA" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "ECHO" data_type: TYPE_STRING dims: [ 1 ] }
dynamic_batching { max_queue_delay_microseconds: 20000 } instance_group { kind: KIND_CPU count: 1 }
"""


def write_models(
    repository: Path,
    names: Sequence[str] = (DIGEST,),
    frail_parameters: Mapping[str, str] | None = None,
    partitions: int = 1,
) -> None:
    """These models; `frail_parameters` are parameters of the configuration of FRAIL.

    DIGEST and TOTAL have so many partitions, and an instance on each worker for each of them.
    """
    known = {
        DIGEST: (_divided(_DIGEST, partitions), _DIGEST_CODE),
        TOTAL: (_divided(_TOTAL, partitions), _TOTAL_CODE),
        COUNTED: (_COUNTED, _COUNTED_CODE),
        FRAIL: (_FRAIL + _parameters(frail_parameters or {}), _FRAIL_CODE),
    }
    for name in names:
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(known[name][1])
        (folder.parent / "config.pbtxt").write_text(known[name][0])


def _divided(config: str, partitions: int) -> str:
    if partitions == 1:
        return config
    instances = config.replace("count: 1 }", f"count: {partitions} }}")
    return instances + _parameters({"weir_partitions": str(partitions)})


def _parameters(values: Mapping[str, str]) -> str:
    return "".join(
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n' for name, value in values.items()
    )


def bytes_request(data: bytes, id: str = "") -> tuple[bytes, dict[str, str]]:
    """Body and headers of a request to DIGEST or FRAIL."""
    tensor = len(data).to_bytes(4, "little") + data
    given = {"name": "DATA", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(tensor)}}
    header = json.dumps({**({"id": id} if id else {}), "inputs": [given]}).encode()
    return header + tensor, {"Inference-Header-Content-Length": str(len(header)), **authorization("")}


def int64_request(value: int, **parameters: object) -> bytes:
    """Body of a request to TOTAL; `parameters` name its sequence."""
    given = {"name": "IN", "datatype": "INT64", "shape": [1, 1], "data": [value]}
    return json.dumps({"inputs": [given], "parameters": parameters}).encode()


_PATIENCE_S = 60.0

Told = dict[str, str]
"""The headers of a response in lower case; "body" is its body."""


async def produce(url: str, model: str, data: bytes, id: str, **headers: str) -> Told:
    """Publish a request and return its terminal record. Raises TimeoutError without one."""
    client = await nats.connect(url)
    try:
        body, named = bytes_request(data)
        named |= {"Nats-Msg-Id": id} | {name.replace("_", "-"): value for name, value in headers.items()}
        jetstream = client.jetstream()
        await jetstream.publish(event(model), body, headers=named)
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                try:
                    found = await jetstream.get_last_msg(RESULT_STREAM, result(model, id))
                    reply = {name.lower(): value for name, value in (found.headers or {}).items()}
                    return {**reply, "body": (found.data or b"").decode(errors="replace")}
                except NotFoundError:
                    await asyncio.sleep(0.05)
    finally:
        await client.close()

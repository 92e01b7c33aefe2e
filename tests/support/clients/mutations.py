"""Mutated requests for fuzzing: valid requests with random damage, repeatable by a seed."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tritonclient.grpc import service_pb2

_NASTY: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    2**31,
    2**63,
    2**64,
    10**40,
    1e308,
    "",
    "\0",
    "ü" * 50,
    "x" * 5000,
    [],
    {},
    [[]],
    [None],
    {"": None},
    "binary_data_size",
    "../../etc/passwd",
    "INT32",
    "BYTES",
    "BF16",
    "IN",
]


class HttpRequest(NamedTuple):
    """A request as it is sent, whole."""

    data: bytes


def http_requests(seed: int, count: int) -> Iterator[HttpRequest]:
    """`count` damaged HTTP requests; each has a true Content-Length, so that the connection stays usable."""
    chance = random.Random(seed)
    for _ in range(count):
        method, path, headers, body = chance.choice(_HTTP_KINDS)(chance)
        lines = [f"{method} {path} HTTP/1.1", "Host: weir", f"Content-Length: {len(body)}", *headers]
        yield HttpRequest("\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body)


def grpc_requests(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """`count` pairs of a method and the damaged bytes of its request."""
    chance = random.Random(seed)
    for _ in range(count):
        if chance.random() < 0.7:
            yield "ModelInfer", _damaged_bytes(chance, _infer_message(chance))
        else:
            method = chance.choice(_OTHER_METHODS)
            yield (
                method,
                _damaged_bytes(
                    chance, service_pb2.ModelConfigRequest(name="identity", version="1").SerializeToString()
                ),
            )


# Damage


def _damaged_value(chance: random.Random, value: Any, depth: int = 0) -> Any:
    """A JSON value with something in it replaced, removed, repeated or added."""
    if depth and chance.random() < 0.25:
        return chance.choice(_NASTY)
    if isinstance(value, dict) and value:
        copy = dict(value)
        key = chance.choice(list(copy))
        action = chance.random()
        if action < 0.15:
            del copy[key]
        elif action < 0.25:
            copy[str(chance.choice(_NASTY))] = chance.choice(_NASTY)
        else:
            copy[key] = _damaged_value(chance, copy[key], depth + 1)
        return copy
    if isinstance(value, list) and value:
        items = list(value)
        place = chance.randrange(len(items))
        action = chance.random()
        if action < 0.15:
            del items[place]
        elif action < 0.3:
            items.insert(place, items[place])
        else:
            items[place] = _damaged_value(chance, items[place], depth + 1)
        return items
    return chance.choice(_NASTY)


def _damaged_bytes(chance: random.Random, data: bytes) -> bytes:
    """Bytes with a few flipped, cut out, repeated or put in."""
    damaged = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(damaged) + 1) if damaged else 0
        action = chance.random()
        if action < 0.5 and place < len(damaged):
            damaged[place] = chance.randrange(256)
        elif action < 0.7:
            del damaged[place : place + chance.randint(1, 8)]
        elif action < 0.85:
            damaged[place:place] = chance.randbytes(chance.randint(1, 8))
        else:
            damaged += damaged[place : place + 64]
    return bytes(damaged)


# HTTP

_HttpParts = tuple[str, str, list[str], bytes]


def _document(chance: random.Random, binary: bool) -> dict[str, Any]:
    tensor: dict[str, Any] = {"name": "IN", "datatype": "FP32", "shape": [1, 2]}
    if binary:
        tensor["parameters"] = {"binary_data_size": 8}
    else:
        tensor["data"] = [1.5, 2.5]
    document: dict[str, Any] = {"id": "a", "inputs": [tensor]}
    if chance.random() < 0.5:
        document["outputs"] = [{"name": "OUT", "parameters": {"binary_data": binary, "classification": 1}}]
    if chance.random() < 0.5:
        document["parameters"] = {"priority": 1, "timeout": 5, "own": "value", "sequence_id": 3, "sequence_start": True}
    return document


def _infer_json(chance: random.Random) -> _HttpParts:
    body = json.dumps(_damaged_value(chance, _document(chance, False))).encode()
    return "POST", "/v2/models/identity/infer", [], body


def _infer_json_bytes(chance: random.Random) -> _HttpParts:
    return (
        "POST",
        "/v2/models/identity/infer",
        [],
        _damaged_bytes(chance, json.dumps(_document(chance, False)).encode()),
    )


def _infer_binary(chance: random.Random) -> _HttpParts:
    document = _document(chance, True)
    header = json.dumps(_damaged_value(chance, document) if chance.random() < 0.7 else document).encode()
    content = struct.pack("<ff", 1.5, 2.5) if chance.random() < 0.7 else chance.randbytes(chance.randint(0, 20))
    length: Any = len(header) if chance.random() < 0.7 else chance.choice([0, -1, len(header) + 5, 10**20, "x", ""])
    return "POST", "/v2/models/identity/infer", [f"Inference-Header-Content-Length: {length}"], header + content


def _infer_encoded(chance: random.Random) -> _HttpParts:
    encoding = chance.choice(["gzip", "deflate", "identity", "br", "gzip, gzip"])
    body = _damaged_bytes(chance, bytes.fromhex("1f8b08000000000000ff") + chance.randbytes(40))
    return "POST", "/v2/models/identity/infer", [f"Content-Encoding: {encoding}", "Accept-Encoding: gzip;q=x, *"], body


def _generate(chance: random.Random) -> _HttpParts:
    document = _damaged_value(chance, {"IN": [1.5, 2.5], "id": "g", "parameters": {"own": 1}, "other": 2})
    path = chance.choice(["generate", "generate_stream"])
    return "POST", f"/v2/models/identity/{path}", [], json.dumps(document).encode()


def _administration(chance: random.Random) -> _HttpParts:
    path, document = chance.choice(
        [
            ("/v2/repository/index", {"ready": True}),
            ("/v2/repository/models/identity/load", {"parameters": {"config": "{}", "file:1/model.py": "AAAA"}}),
            ("/v2/repository/models/nowhere/unload", {"parameters": {"unload_dependents": True}}),
            ("/v2/systemsharedmemory/region/r/register", {"key": "/k", "offset": 0, "byte_size": 64}),
            ("/v2/cudasharedmemory/region/r/register", {"raw_handle": {"b64": "AA=="}, "device_id": 0, "byte_size": 8}),
            ("/v2/systemsharedmemory/region/r/unregister", {}),
            ("/v2/models/identity/trace/setting", {"trace_level": ["OFF"], "trace_rate": "1", "trace_count": "-1"}),
        ]
    )
    damaged = _damaged_value(chance, document) if document else document
    body = (
        json.dumps(damaged).encode() if chance.random() < 0.8 else _damaged_bytes(chance, json.dumps(document).encode())
    )
    return "POST", path, [], body


def _paths(chance: random.Random) -> _HttpParts:
    known = chance.choice(["/v2", "/v2/models/identity", "/v2/models/identity/versions/1/config", "/v2/models/stats"])
    damaged = bytes(byte for byte in _damaged_bytes(chance, known.encode()) if 33 <= byte < 127).decode() or "/"
    return chance.choice(["GET", "POST", "PUT", "HEAD"][:3]), "/" + damaged.lstrip("/"), [], b""


_HTTP_KINDS: list[Callable[[random.Random], _HttpParts]] = [
    _infer_json,
    _infer_json,
    _infer_json_bytes,
    _infer_binary,
    _infer_binary,
    _infer_encoded,
    _generate,
    _administration,
    _paths,
]

# gRPC

_OTHER_METHODS = [
    "ModelReady",
    "ModelMetadata",
    "ModelConfig",
    "ModelStatistics",
    "RepositoryIndex",
    "SystemSharedMemoryStatus",
    "SystemSharedMemoryRegister",
    "CudaSharedMemoryRegister",
    "TraceSetting",
]


def _infer_message(chance: random.Random) -> bytes:
    request = service_pb2.ModelInferRequest(model_name="identity", id="a")
    tensor = request.inputs.add(name="IN", datatype="FP32", shape=[1, 2])
    if chance.random() < 0.5:
        request.raw_input_contents.append(struct.pack("<ff", 1.5, 2.5))
    else:
        tensor.contents.fp32_contents.extend([1.5, 2.5])
    if chance.random() < 0.3:
        request.outputs.add(name="OUT").parameters["classification"].int64_param = 1
    if chance.random() < 0.3:
        request.parameters["priority"].uint64_param = 1
        request.parameters["own"].string_param = "value"
    return bytes(request.SerializeToString())

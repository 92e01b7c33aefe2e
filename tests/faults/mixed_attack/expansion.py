"""Attacks that send little: what they send expands, costs work, or never ends."""

from __future__ import annotations

import gzip
import json
import random
import time
import zlib
from contextlib import ExitStack

from tests.faults.mixed_attack import wire
from tests.faults.mixed_attack.models import BYTES, FP32
from tests.faults.mixed_attack.registry import ANSWER_S, Target, attack

_FIELDS = 120
_BLOCKS = 300


@attack()
def header_blocks(target: Target, own: random.Random) -> str:
    """Header blocks of a hundred bytes, each with as many indexed fields of a kilobyte."""
    name, value = b"x-long", b"v" * 1000
    entry = b"\x40" + bytes((len(name),)) + name + b"\x7f" + b"\xe9\x06" + value  # 127 + 105 + 6 * 128
    with wire.connected(target.grpc, 5.0) as connection:
        connection.sendall(wire.http2_start())
        for number in range(own.randrange(50, _BLOCKS)):
            block = wire.call_head() + (entry if not number else b"") + b"\xbe" * own.randrange(10, _FIELDS)
            connection.sendall(wire.headers_frame(2 * number + 1, block))
        return wire.answer(connection)


@attack()
def endless_trailer(target: Target, own: random.Random) -> str:
    """Trailers after a chunked body, for as long as they are read."""
    head = f"POST /v2/models/{FP32}/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n"
    with wire.connected(target.http, 3.0) as connection:
        connection.sendall(head.encode())
        until_s = time.monotonic() + own.uniform(1.0, 4.0)
        while time.monotonic() < until_s:
            connection.sendall(b"X-Trailer: " + b"t" * 60_000 + b"\r\n")
        return wire.answer(connection)


@attack()
def silent_connections(target: Target, own: random.Random) -> str:
    """Connections that say nothing, on both ports."""
    with ExitStack() as held:
        for _ in range(own.randrange(20, 120)):
            held.enter_context(wire.connected(own.choice([target.http, target.grpc]), 3.0))
        time.sleep(own.uniform(0.5, 4.0))
    return "held"


@attack(is_heavy=True)
def gzip_bodies(target: Target, own: random.Random) -> str:
    """A body of some ten kilobytes that expands to as many megabytes."""
    size = own.randrange(10 << 20, 60 << 20)
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    document = json.dumps({"inputs": [tensor]}).encode()
    body = gzip.compress(document[:-1] + b" " * size + b"}", 6)
    with ExitStack() as held:
        connections = [held.enter_context(wire.connected(target.http, ANSWER_S)) for _ in range(own.randrange(2, 12))]
        for connection in connections:
            connection.sendall(wire.post(f"/v2/models/{FP32}/infer", body, "Content-Encoding: gzip\r\n"))
        return wire.answer(connections[-1])


@attack(is_heavy=True)
def grpc_gzip(target: Target, own: random.Random) -> str:
    """Messages of 60 KB that expand to 60 MB, on many streams of a connection."""
    plain = wire.infer_message(FP32, "FP32", 1, bytes(own.randrange(10 << 20, 60 << 20)))[5:]
    stream = zlib.compressobj(6, zlib.DEFLATED, 31)
    packed = stream.compress(plain) + stream.flush()
    message = b"\1" + len(packed).to_bytes(4, "big") + packed
    with wire.connected(target.grpc, 5.0) as connection:
        connection.sendall(wire.http2_start())
        for number in range(own.randrange(2, 20)):
            wire.send_call(connection, 2 * number + 1, message, "gzip")
        time.sleep(own.uniform(0.5, 3.0))
    return "sent"


@attack()
def short_json_of_many_values(target: Target, own: random.Random) -> str:
    """JSON below 256 KiB of which each three bytes are a value."""
    value = own.choice(['""', "[]", "{}"])
    count = 80_000
    data = ",".join([value] * count)
    tensor = f'{{"name":"INPUT0","datatype":"BYTES","shape":[1,{count}],"data":[{data}]}}'
    body = f'{{"inputs":[{tensor}]}}'.encode()
    return f"{value}: {target.ask(wire.post(f'/v2/models/{BYTES}/infer', body))}"


@attack()
def odd_ids(target: Target, own: random.Random) -> str:
    """Ids of jobs, and names of models, that are no ids or names."""
    id = own.choice(["9" * 40, "%00", "%2F..%2F", "-1", "%ED%A0%80", "batch-" + "f" * 5000])
    path = own.choice([f"/v2/jobs/{id}", f"/v2/jobs/{id}/result", f"/v2/models/{id}/ready", f"/v2/jobs/{id}/items"])
    return target.ask(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

"""The attacks, in random order by a seed: `python -m tests.faults.mixed_attack.attacks PLACES` prints the outcomes.

It is a separate process with a lower priority than server and honest clients. PLACES is JSON: `http`, `grpc`
("host:port"), `nats` (a URL), `seconds`, `seed` and `threads`. All attacks are on loopback and bounded: each ends within
seconds, and at most two of the heavy ones run at a time.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, nullcontext, suppress

import msgpack
import nats

import tests.faults.mixed_attack.expansion  # noqa: F401 - registers its attacks
from tests.faults.mixed_attack import wire
from tests.faults.mixed_attack.models import BYTES, FP32, INT32, REPEAT, SIMPLE
from tests.faults.mixed_attack.registry import ANSWER_S, ATTACKS, HEAVY, Target, attack

LIMIT_BYTES = 60 << 20
"""Size of a body over HTTP: slightly below `--http-max-input-size`."""

GRPC_LIMIT_BYTES = 200 << 20
NATS_LIMIT_BYTES = 7 << 20

# HTTP


def _simple() -> bytes:
    vector = [[1] * 16]
    inputs = [{"name": name, "datatype": "INT32", "shape": [1, 16], "data": vector} for name in ("INPUT0", "INPUT1")]
    return json.dumps({"inputs": inputs}).encode()


def _infer(model: str) -> str:
    return f"/v2/models/{model}/infer"


@attack()
def pipelined_refusals(target: Target, own: random.Random) -> str:
    """One valid and a thousand invalid requests in one write."""
    refused = wire.post(_infer("nowhere"), b"{}")
    with wire.connected(target.http, 3.0) as connection:
        connection.sendall(wire.post(_infer(SIMPLE), _simple()) + refused * own.randrange(100, 1000))
        status = wire.answer(connection)
        with suppress(OSError):
            while connection.recv(1 << 20):
                pass
    return status


@attack()
def odd_header(target: Target, own: random.Random) -> str:
    """A header with an invalid number after a valid request."""
    value = own.choice(["²", "9" * 5000, "-1", "1_0", " ", "0x10", "١"])
    odd = f"Inference-Header-Content-Length: {value}\r\n".encode()
    request = wire.post(_infer(SIMPLE), _simple())
    return target.ask(request + request.replace(b"Content-Length", odd + b"Content-Length", 1), 5.0)


@attack()
def random_bytes(target: Target, own: random.Random) -> str:
    """A request with random bytes changed, or random bytes only."""
    request = bytearray(wire.post(_infer(SIMPLE), _simple()))
    for _ in range(own.randrange(1, 20)):
        request[own.randrange(len(request))] = own.randrange(256)
    address = own.choice([target.http, target.grpc])
    with wire.connected(address, 1.0) as connection:
        connection.sendall(bytes(request) if own.random() < 0.8 else own.randbytes(4096))
        return wire.answer(connection)


@attack()
def slow_bodies(target: Target, own: random.Random) -> str:
    """Announce large bodies and send one byte of each."""
    with ExitStack() as held:
        for _ in range(own.randrange(5, 25)):
            connection = held.enter_context(wire.connected(target.http, 1.0))
            path = own.choice([_infer(FP32), "/v2/models/simple/generate"])
            connection.sendall(wire.post(path, b"{", announced_bytes=own.randrange(1 << 17, LIMIT_BYTES)))
        time.sleep(own.uniform(2.0, 8.0))
        return wire.answer(connection)


@attack(is_heavy=True)
def unfinished_bodies(target: Target, own: random.Random) -> str:
    """Send all but the last byte of bodies."""
    paths = [
        (_infer(FP32), ""),
        (_infer(FP32), "Prefer: respond-async\r\n"),
        (f"/v2/models/{SIMPLE}/generate", ""),
        ("/v2/repository/models/evil/load", ""),
        (_infer(FP32), "Content-Encoding: gzip\r\n"),
    ]
    outcome = ""
    with ExitStack() as held:
        for _ in range(own.randrange(2, 6)):
            path, headers = own.choice(paths)
            size = own.randrange(4 << 20, LIMIT_BYTES)
            connection = held.enter_context(wire.connected(target.http, 3.0))
            try:
                connection.sendall(wire.post(path, b"", headers, announced_bytes=size))
                for start in range(0, size - 1, wire.CHUNK_BYTES):
                    connection.sendall(bytes(min(wire.CHUNK_BYTES, size - 1 - start)))
                outcome = "sent"
            except OSError as error:
                outcome = type(error).__name__
        time.sleep(own.uniform(0.5, 3.0))
    return outcome


@attack(is_heavy=True)
def large_json(target: Target, own: random.Random) -> str:
    """JSON near the body limit."""
    size = int(LIMIT_BYTES * own.choice([0.1, 0.5, 1.0]))
    kind = own.choice(["ints", "floats", "strings", "wrong count", "deep", "parameters", "outputs"])
    model, datatype, count, data, more = INT32, "INT32", 1, "1", ""
    if kind == "ints":
        count, data = size // 2, ",".join(["1"] * (size // 2))
    elif kind == "floats":
        model, datatype, count, data = FP32, "FP32", size // 4, ",".join(["1e9"] * (size // 4))
    elif kind == "strings":
        model, datatype, count, data = BYTES, "BYTES", size // 3, ",".join(['""'] * (size // 3))
    elif kind == "wrong count":
        count, data = 3, ",".join(["1"] * (size // 2))
    elif kind == "deep":
        data = "[" * (size // 2) + "]" * (size // 2)
    elif kind == "parameters":
        fields = ",".join(f'"{number}":1' for number in range(size // 12))
        more = f',"parameters":{{{fields}}}'
    else:
        outputs = ",".join(f'{{"name":"{number}"}}' for number in range(size // 18))
        more = f',"outputs":[{outputs}]'
    shape = f"[1,{count}]" if model != INT32 else f"[{count}]"
    body = f'{{"inputs":[{{"name":"INPUT0","datatype":"{datatype}","shape":{shape},"data":[{data}]}}]{more}}}'.encode()
    return f"{kind}: {target.ask(wire.post(_infer(model), body))}"


@attack(is_heavy=True)
def large_binary(target: Target, own: random.Random) -> str:
    """Expensive binary tensors: millions of empty strings, JSON outputs, classification of every element."""
    size = int(LIMIT_BYTES * own.choice([0.1, 0.5, 1.0])) // 4 * 4
    kind = own.choice(["strings", "wrong count", "JSON answer", "classes"])
    is_bytes = kind in ("strings", "wrong count")
    given = {
        "name": "INPUT0",
        "datatype": "BYTES" if is_bytes else "FP32",
        "shape": [1, size // 4 + (kind == "wrong count")],
        "parameters": {"binary_data_size": size},
    }
    output: dict[str, object] = {"name": "OUTPUT0", "parameters": {"binary_data": is_bytes}}
    if kind == "classes":
        output["parameters"] = {"classification": size // 4}
    header = json.dumps({"inputs": [given], "outputs": [output]}).encode()
    headers = f"Inference-Header-Content-Length: {len(header)}\r\n"
    model = BYTES if is_bytes else FP32
    return f"{kind}: {target.ask(wire.post(_infer(model), header + bytes(size), headers))}"


@attack()
def distinct_urls(target: Target, own: random.Random) -> str:
    """Long, different URLs on one connection."""
    statuses: Counter[str] = Counter()
    with wire.connected(target.http, 5.0) as connection:
        for _ in range(200):
            path = f"{_infer(SIMPLE)}?{own.getrandbits(64):x}{'a' * own.randrange(1000, 60_000)}"
            connection.sendall(wire.post(path, b""))
            status = wire.answer(connection)
            statuses[status] += 1
            if status in ("closed", "silence"):
                break
    return statuses.most_common(1)[0][0]


@attack()
def foreign_page(target: Target, own: random.Random) -> str:
    """A cross-site request from a browser: it loads a model with its own code."""
    config = {"name": "evil", "backend": "python", "input": [], "output": []}
    code = base64.b64encode(b"raise SystemExit").decode()
    body = json.dumps({"parameters": {"config": json.dumps(config), "file:1/model.py": code}}).encode()
    headers = "Origin: http://evil.example\r\nSec-Fetch-Site: cross-site\r\nContent-Type: text/plain\r\n"
    verb = own.choice(["load", "unload"])
    return target.ask(wire.post(f"/v2/repository/models/{own.choice(['evil', SIMPLE])}/{verb}", body, headers))


@attack()
def bursts(target: Target, own: random.Random) -> str:
    """Hundreds of requests on one connection, which is then closed."""
    body = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1], "data": [1]}]}).encode()
    request = wire.post(_infer(INT32), body)
    status = ""
    with wire.connected(target.http, 10.0) as connection:
        for _ in range(own.randrange(100, 450)):
            connection.sendall(request)
            status = wire.answer(connection)
            if status in ("closed", "silence"):
                break
    return status


# gRPC


@attack(is_heavy=True)
def grpc_strings(target: Target, own: random.Random) -> str:
    """One input of millions of empty strings, with one more announced."""
    size = int(GRPC_LIMIT_BYTES * own.choice([0.1, 0.5, 1.0])) // 4 * 4
    message = wire.infer_message(BYTES, "BYTES", size // 4 + 1, bytes(size))
    with wire.connected(target.grpc, ANSWER_S) as connection:
        connection.sendall(wire.http2_start())
        wire.send_call(connection, 1, message)
        while True:
            received = connection.recv(65536)
            if not received or b"element" in received or b"grpc-status" in received:
                return "answered" if received else "closed"


@attack(is_heavy=True)
def grpc_unread(target: Target, own: random.Random) -> str:
    """Request large responses and read none."""
    size = 16 << 20
    message = wire.infer_message(FP32, "FP32", size // 4, bytes(size))
    with wire.connected(target.grpc, 5.0) as connection:
        connection.sendall(wire.http2_start(window_bytes=0))
        for number in range(own.randrange(2, 8)):
            wire.send_call(connection, 2 * number + 1, message)
            time.sleep(0.15)
        time.sleep(own.uniform(1.0, 4.0))
    return "held"


# NATS


@attack(is_heavy=True)
def nats_nesting(target: Target, own: random.Random) -> str:
    """Messages near the broker's limit that are expensive to parse."""
    count = NATS_LIMIT_BYTES // 4
    given = {"name": "INPUT0", "datatype": "BYTES", "shape": [1, count + 1], "data": bytes(4 * count)}
    ints = {"name": "INPUT0", "datatype": "INT32", "shape": [count + 1], "data": [1] * count}
    kinds = {
        "msgpack strings": (BYTES, msgpack.packb({"inputs": [given]}), True),
        "msgpack ints": (INT32, msgpack.packb({"inputs": [ints]}), True),
        "msgpack deep": (INT32, b"\x81\xa6inputs" + b"\x91" * NATS_LIMIT_BYTES + b"\xc0", True),
        "JSON deep": (INT32, b'{"inputs":' + b"[" * count + b"]" * count + b"}", False),
    }
    kind = own.choice(list(kinds))
    model, body, is_msgpack = kinds[kind]

    async def ask() -> str:
        client = await nats.connect(target.nats, allow_reconnect=False)
        try:
            headers = {"Content-Type": "application/msgpack"} if is_msgpack else None
            await client.request(f"infer.{model}", body, timeout=ANSWER_S, headers=headers)
            return "answered"
        except nats.errors.Error as error:
            return type(error).__name__
        finally:
            await client.close()

    return f"{kind}: {asyncio.run(ask())}"


@attack()
def nats_odd_bytes(target: Target, own: random.Random) -> str:
    """Subjects, reply subjects and status lines that are not UTF-8, also in stored messages."""
    body = _simple()
    odd = own.randbytes(own.randrange(1, 6)).translate(bytes(b if b > 127 else 255 for b in range(256)))
    messages = [
        wire.nats_pub(b"infer.simple", b"_INBOX." + odd, body),
        wire.nats_pub(b"infer." + odd, b"_INBOX.x", body),
        wire.nats_pub(b"event.simple." + odd, b"_INBOX.x", body),
        b"HPUB infer.simple _INBOX.x 19 19\r\nNATS/1.0 " + odd[:1] * 2 + b" 503\r\n\r\n\r\n",
    ]
    with wire.nats_connection(target.nats, 2.0) as connection:
        connection.sendall(own.choice(messages) + b"PING\r\n")
        return "taken" if b"PONG" in connection.recv(4096) else "refused"


@attack()
def forged_replies(target: Target, own: random.Random) -> str:
    """Requests with a reply subject on which the sender may not publish: records, streams, internal subjects."""
    subjects = [
        "result.simple.forged",
        "$JS.API.STREAM.PURGE.RESULT",
        "$JS.API.STREAM.DELETE.QUEUE",
        "$JS.API.STREAM.DELETE.LIVE",
        "$KV.weir-registry.forged",
        "_INBOX_gateway.forged",
        "$SYS.REQ.SERVER.PING",
    ]
    empty = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [0], "data": []}]}).encode()
    asked, body = own.choice([(b"infer.simple", _simple()), (f"infer.{REPEAT}".encode(), empty)])
    with wire.nats_connection(target.nats, 2.0) as connection:
        connection.sendall(wire.nats_pub(asked, own.choice(subjects).encode(), body) + b"PING\r\n")
        return "taken" if b"PONG" in connection.recv(4096) else "refused"


@attack()
def object_metadata(target: Target, own: random.Random) -> str:
    """Durable requests with inconsistent objects: no digest, invalid sizes, more content than declared."""
    changes: list[dict[str, object] | None] = [
        {"digest": None},
        {"digest": "zz"},
        {"size": "x"},
        {"size": None, "chunks": None},
        {"chunks": "x"},
        {"size": 10},
        {"options": {"link": {"bucket": "nope", "name": "x"}}},
        {"options": "x"},
        None,
    ]
    change = own.choice(changes)
    content = bytes(24 << 20) if change == {"size": 10} else _simple()
    name = f"odd-{own.getrandbits(64):x}"

    async def publish() -> str:
        client = await nats.connect(target.nats, allow_reconnect=False)
        try:
            jetstream = client.jetstream()
            store = await jetstream.object_store("requests")
            await store.put(name, io.BytesIO(content))
            subject = f"$O.requests.M.{base64.urlsafe_b64encode(name.encode()).decode()}"
            metadata = json.loads((await jetstream.get_last_msg("OBJ_requests", subject)).data)
            if change == {"digest": None}:
                del metadata["digest"]
            elif change is not None:
                metadata |= change
            data = b"[1]" if change is None else json.dumps(metadata).encode()
            await jetstream.publish(subject, data, headers={"Nats-Rollup": "sub"})
            headers = {"Weir-Object": name, "Nats-Msg-Id": name}
            await jetstream.publish(f"event.{SIMPLE}", b"", headers=headers)
            return "stored"
        finally:
            await client.close()

    return asyncio.run(publish())


@attack()
def patient_events(target: Target, own: random.Random) -> str:
    """Durable requests of 90 KB whose deadline is an hour away."""
    data = [1_000_000 + number for number in range(10_000)]
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [10_000], "data": data}
    body = json.dumps({"inputs": [tensor]}).encode()

    async def publish() -> str:
        client = await nats.connect(target.nats, allow_reconnect=False)
        try:
            for _ in range(own.randrange(20, 100)):
                headers = {"Weir-Deadline-Ms": str((int(time.time()) + 3600) * 1000)}
                headers["Nats-Msg-Id"] = f"patient-{own.getrandbits(64):x}"
                await client.jetstream().publish(f"event.{INT32}", body, headers=headers)
            return "stored"
        finally:
            await client.close()

    return asyncio.run(publish())


def run(target: Target, seconds: float, seed: int, threads: int, names: list[str]) -> dict[str, dict[str, int]]:
    """Run the attacks from several threads; returns how often each attack had which outcome."""
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in names}
    end_s = time.monotonic() + seconds
    heavy = threading.Semaphore(2)

    def go_on(own: random.Random) -> None:
        while time.monotonic() < end_s:
            name = own.choice(names)
            with heavy if name in HEAVY else nullcontext():
                try:
                    outcome = ATTACKS[name](target, own)
                except (OSError, TimeoutError, nats.errors.Error, nats.js.errors.Error) as error:
                    outcome = type(error).__name__
            outcomes[name][outcome] += 1
            time.sleep(own.uniform(0.0, 0.3))

    attackers = [threading.Thread(target=go_on, args=(random.Random(f"{seed}-{n}"),)) for n in range(threads)]
    for attacker in attackers:
        attacker.start()
    for attacker in attackers:
        attacker.join()
    return {name: dict(counted) for name, counted in outcomes.items()}


def main() -> None:
    """Run the attacks, then print the outcomes as JSON."""
    os.nice(10)
    given = json.loads(sys.argv[1])
    target = Target(given["http"], given["grpc"], given["nats"])
    names = given.get("attacks") or list(ATTACKS)
    print(json.dumps(run(target, float(given["seconds"]), int(given["seed"]), int(given["threads"]), names)))


if __name__ == "__main__":
    main()

"""What strangers find out and cost, and how soon a key that is taken back lets nobody in any more.

    python -m benchmarks.strangers [hidden|attacks|revoked …] [--tries 1000] [--seconds 20]

`hidden`: medians of the times that a model which a client may not see, and one that does not exist, take to be denied, over
HTTP and gRPC, in turns; and the same of the request of another client and one that does not exist. `attacks`: the longest
wait of an honest client alone, and while 16 clients in another process send forged tokens and wrong keys. `revoked`: the
time from the removal of a key until the last of four gateways, `weir durable` and the console refuse it, ten times.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import random
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import jwt
import nats
import psutil
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import RSAAlgorithm
from nats.aio.client import Client
from nats.js.errors import NotFoundError
from tritonclient.grpc import service_pb2

from benchmarks.cluster.clients import table
from benchmarks.compare.networks import NETWORKS
from weir.access.keys.ring import KeyRing
from weir.bus.kv.access_keys import AccessKeys
from weir.bus.naming.durable_subjects import RESULT_STREAM, event, result
from weir.bus.nats.connection import Bus
from weir.perf.clients.addresses import ServerAddress
from weir.perf.clients.grpc import SERVICE, open_channel
from weir.perf.clients.http import HttpConnection, HttpReply, http_head
from weir.server import Server

NETWORK = NETWORKS["identity_fp32"]
OPEN = NETWORK.name
HIDDEN, ABSENT = "hidden_model", "absent_model"
ISSUER, AUDIENCE = "https://issuer.test", "weir"
POLICY = f"""
roles:
  anonymous: {{rules: [{{actions: [health]}}]}}
  caller: {{rules: [{{model: {OPEN}, actions: [infer, metadata, jobs]}}]}}
  other: {{rules: [{{actions: ["*"]}}]}}
  reader: {{rules: [{{actions: [console-read]}}]}}
tokens:
  - {{issuer: "{ISSUER}", audience: {AUDIENCE}, keys: issuer.json}}
"""
ATTACKERS, KEYS_OF_ISSUER, DISTINCT = 16, 64, 10_000
GATEWAYS, CONNECTIONS, TRIES = 4, 48, 10
_TIMEOUT_S = 60.0
_SETTLES_S = 0.5


class World(NamedTuple):
    """A running server with a policy, and the key of its issuer of tokens."""

    server: Server
    folder: Path
    issuer: rsa.RSAPrivateKey

    def new_key(self, name: str, *roles: str) -> str:
        """A new key, which the broker keeps."""
        words = ["key", "create", name, *(f"--role={role}" for role in roles), f"--nats={self.server.nats_url}"]
        command = [sys.executable, "-m", "weir", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@contextlib.contextmanager
def world(**options: Any) -> Iterator[World]:
    """A server of two models with the policy, whose issuer has many keys."""
    with tempfile.TemporaryDirectory(prefix="strangers-") as temporary:
        folder = Path(temporary)
        NETWORK.write(folder / "models", "onnxruntime")
        dataclasses.replace(NETWORK, name=HIDDEN).write(folder / "models", "onnxruntime")
        (folder / "policy.yaml").write_text(POLICY)
        issuer = rsa.generate_private_key(65537, 2048)
        others = [rsa.generate_private_key(65537, 2048) for _ in range(2)]
        rows = [
            {**RSAAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": f"k{number}"}
            for number, key in zip(
                range(KEYS_OF_ISSUER), itertools.chain([issuer], itertools.cycle(others)), strict=False
            )
        ]
        (folder / "issuer.json").write_text(json.dumps({"keys": rows}))
        given = {"access_policy": str(folder / "policy.yaml"), "batch_root": str(folder), **options}
        with Server(folder / "models", **given) as server:
            yield World(server, folder, issuer)


class Asker:
    """Sends requests over one HTTP connection, which it opens again when the server has closed it."""

    def __init__(self, place: str) -> None:
        self._address = ServerAddress.parse(place)
        self._connection: HttpConnection | None = None

    async def ask(self, method: str, path: str, authorization: str, body: bytes = b"", **headers: str) -> HttpReply:
        """The response."""
        if self._connection is None or not self._connection.is_open:
            self._connection = await HttpConnection.open(self._address, _TIMEOUT_S)
        shown = {"Authorization": authorization, **{name.replace("_", "-"): text for name, text in headers.items()}}
        head = http_head(self._address, method, path, shown, len(body))
        return await self._connection.exchange([head, body], keeps_body=True)

    def close(self) -> None:
        """Ends the connection."""
        if self._connection is not None:
            self._connection.close()


def infer_body() -> bytes:
    """A request of the model, in JSON."""
    x = NETWORK.sample(0)
    tensor = {"name": "X", "shape": list(x.shape), "datatype": NETWORK.datatype, "data": x.reshape(-1).tolist()}
    return json.dumps({"inputs": [tensor]}).encode()


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Waits until something is so. Raises TimeoutError."""
    async with asyncio.timeout(_TIMEOUT_S):
        while not await is_so():
            await asyncio.sleep(0.05)


# What can be learned


async def compared(pair: Sequence[Callable[[], Awaitable[object]]], tries: int) -> tuple[float, float]:
    """Medians in microseconds of two calls, which take turns; who begins is drawn."""
    took: tuple[list[float], list[float]] = ([], [])
    for number in range(tries + tries // 10):
        for place in random.sample((0, 1), 2):
            began_s = time.perf_counter()
            await pair[place]()
            if number >= tries // 10:  # the first ones warm up
                took[place].append((time.perf_counter() - began_s) * 1e6)
    return statistics.median(took[0]), statistics.median(took[1])


async def hidden(tries: int) -> None:
    """Compares what is hidden with what does not exist, and prints a table."""
    with world() as of:
        bob, alice = (f"Bearer {of.new_key(*who)}" for who in (("bob", "caller"), ("alice", "caller", "other")))
        http, body = Asker(of.server.http_address), infer_body()

        async def lets_in() -> bool:
            replies = [await http.ask("GET", f"/v2/models/{OPEN}", key) for key in (alice, bob)]
            return all(reply.status == 200 for reply in replies)

        await until(lets_in)
        rows = []

        def add(what: str, medians: tuple[float, float]) -> None:
            rows.append((what, *(f"{median:.0f}" for median in medians), f"{medians[0] / medians[1]:.3f}"))

        async def get(path: str, method: str = "GET", sent: bytes = b"") -> None:
            reply = await http.ask(method, path, bob, sent)
            if reply.status != 404:
                raise SystemExit(f"{path} is answered with {reply.status}: {reply.body!r}")

        for what, method, suffix, sent in (("infer", "POST", "/infer", body), ("metadata", "GET", "", b"")):
            pair = [partial(get, f"/v2/models/{name}{suffix}", method, sent) for name in (HIDDEN, ABSENT)]
            add(f"model, {what}, HTTP", await compared(pair, tries))
        async with open_channel(ServerAddress.parse(of.server.grpc_url)) as channel:
            for what, method, message in (
                ("infer", "ModelInfer", _infer_message),
                ("metadata", "ModelMetadata", lambda name: service_pb2.ModelMetadataRequest(name=name)),
            ):
                call = channel.unary_unary(SERVICE + method)
                pair = [partial(denied, call, message(name), bob) for name in (HIDDEN, ABSENT)]
                add(f"model, {what}, gRPC", await compared(pair, tries))
        accepted = await http.ask("POST", f"/v2/models/{OPEN}/infer", alice, body, Prefer="respond-async")
        id = json.loads(accepted.body)["id"]

        async def is_done() -> bool:
            return bool((await http.ask("GET", f"/v2/jobs/{id}/result", alice)).status == 200)

        await until(is_done)
        (of.folder / "in.jsonl").write_bytes(body + b"\n")
        spec = {"model": OPEN, "input": str(of.folder / "in.jsonl"), "output": str(of.folder / "out")}
        made = await http.ask("POST", "/v2/jobs", alice, json.dumps(spec).encode(), Content_Type="application/json")
        job = json.loads(made.body)["id"]
        for what, one, suffix in (
            ("request, status", id, ""),
            ("request, result", id, "/result"),
            ("job, status", job, ""),
        ):
            absent = one[:-1] + ("0" if one[-1] != "0" else "1")
            pair = [partial(get, f"/v2/jobs/{each}{suffix}") for each in (one, absent)]
            add(f"{what}, HTTP", await compared(pair, tries))
        print(table(("what", "hidden us", "absent us", "ratio"), rows))
        http.close()


async def denied(call: Any, message: Any, shown: str) -> None:
    """A call over gRPC that is answered as one for a model that does not exist."""
    try:
        await call(message.SerializeToString(), metadata=[("authorization", shown)], timeout=_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return
        raise
    raise SystemExit("a model that is hidden, or absent, is answered")


def _infer_message(name: str) -> Any:
    x = NETWORK.sample(0)
    message = service_pb2.ModelInferRequest(model_name=name, raw_input_contents=[x.tobytes()])
    message.inputs.add(name="X", datatype=NETWORK.datatype, shape=x.shape)
    return message


# What attacks cost others


def attacks(issuer: rsa.RSAPrivateKey) -> dict[str, list[str]]:
    """Headers that let nobody in, by the name of the attack."""
    now_s, stranger = time.time(), rsa.generate_private_key(65537, 2048)
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "eve", "roles": ["caller", "other"], "exp": now_s + 3600}
    public = issuer.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def signed(key: rsa.RSAPrivateKey = issuer, head: dict[str, Any] | None = None, **changed: Any) -> str:
        return jwt.encode({**claims, **changed}, key, "RS256", {"kid": "k0", **(head or {})})

    def by_hand(head: dict[str, Any], secret: bytes = b"") -> str:
        text = b".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in (head, claims))
        mark = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256).sign(text, secret) if secret else b""
        return (text + b"." + base64.urlsafe_b64encode(mark).rstrip(b"=")).decode()

    own = RSAAlgorithm.to_jwk(stranger.public_key(), as_dict=True)
    valid, foreign = signed(), signed(stranger)
    head, middle, mark = foreign.split(".")
    tokens = {
        "algorithm none": [by_hand({"alg": alg, "kid": "k0"}) for alg in ("none", "None", "nOnE", "")],
        "key confusion": [by_hand({"alg": "HS256", "kid": "k0"}, public)],
        "kid injection": [
            signed(stranger, {"kid": kid}) for kid in ("../../dev/null", "' OR 1=1 --", "k0\0", "|id", "")
        ],
        "expired": [signed(exp=now_s - 3600)],
        "future": [signed(nbf=now_s + 3600), signed(iat=now_s + 3600)],
        "wrong audience": [signed(aud="other"), signed(aud=["other"])],
        "wrong issuer": [signed(iss="https://evil.test")],
        "jku, jwk, x5u": [
            signed(stranger, head)
            for head in ({"jku": "https://evil.test/k.json"}, {"jwk": own}, {"x5u": "https://evil.test/c.pem"})
        ],
        "crit": [signed(head={"crit": ["b64"], "b64": False})],
        "huge": [valid + "A" * 6_000, signed(stranger, blob="x" * 5_000), valid + "A" * 12_000, "A" * 60_000],
        "deep": [_deep(4_000)],
        "no key id, many keys": [jwt.encode({**claims, "n": n}, stranger, "RS256") for n in range(100)],
        "unknown key id": [signed(stranger, {"kid": f"u{number}"}) for number in range(100)],
        "distinct, badly signed": [
            f"{head}.{middle}.{mark[:-8]}{base64.urlsafe_b64encode(number.to_bytes(6, 'big')).decode()}"
            for number in range(DISTINCT)
        ],
        "wrong keys": [f"weir_{secrets.token_hex(5)}_{secrets.token_urlsafe(32)}" for _ in range(DISTINCT)],
    }
    shown = {name: [f"Bearer {token}" for token in each] for name, each in tokens.items()}
    basic = [base64.b64encode(f"eve:{number}".encode()).decode() for number in range(1000)]
    return {**shown, "passwords": [f"Basic {one}" for one in basic], "malformed": ["Bearer", "Basic !", "x" * 4_000]}


def _deep(levels: int) -> str:
    text = b'{"alg":"RS256","kid":"k0","x":' + b"[" * levels + b"]" * levels + b"}"
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode() + ".e30.AAAA"


def attack(place: str, of: dict[str, list[str]], pipe: Connection) -> None:
    """Sends attacks until told to stop, and reports the statuses by attack."""

    async def run() -> None:
        seen: dict[str, Counter[int]] = {name: Counter() for name in of}
        each = [(name, itertools.cycle(headers), len(headers)) for name, headers in of.items()]
        often = [(name, headers) for name, headers, count in each for _ in range(5 if count >= DISTINCT else 1)]
        turns = itertools.cycle(random.sample(often, len(often)))

        async def attacker() -> None:
            asker = Asker(place)
            while not pipe.poll():
                name, headers = next(turns)
                reply = await asker.ask("POST", f"/v2/models/{OPEN}/infer", next(headers), infer_body())
                seen[name][reply.status] += 1
            asker.close()

        await asyncio.gather(*(attacker() for _ in range(ATTACKERS)))
        pipe.send({name: dict(counts) for name, counts in seen.items()})

    asyncio.run(run())


async def longest_wait_s(asker: Asker, key: str, seconds: float) -> tuple[float, float, int]:
    """The longest and the median wait of a client that sends one request after another, and their number."""
    waits: list[float] = []
    body, end_s = infer_body(), time.monotonic() + seconds
    while time.monotonic() < end_s:
        began_s = time.monotonic()
        reply = await asker.ask("POST", f"/v2/models/{OPEN}/infer", key, body)
        waits.append(time.monotonic() - began_s)
        if reply.status != 200:
            raise SystemExit(f"the honest client is answered with {reply.status}: {reply.body!r}")
    return max(waits), statistics.median(waits), len(waits)


def gateway_mib(server: Server) -> float:
    """Resident memory of the gateway."""
    children = psutil.Process(server.pid).children()
    return max(child.memory_info().rss for child in children if "gateway" in " ".join(child.cmdline())) / 2**20


async def attacked(seconds: float) -> None:
    """Measures an honest client alone and beside attackers, and prints both."""
    with world() as of:
        asker, key = Asker(of.server.http_address), f"Bearer {of.new_key('alice', 'caller')}"

        async def lets_in() -> bool:
            return bool((await asker.ask("GET", f"/v2/models/{OPEN}", key)).status == 200)

        await until(lets_in)
        valid = jwt.encode(
            {"iss": ISSUER, "aud": AUDIENCE, "sub": "bob", "roles": ["caller"], "exp": time.time() + 600},
            of.issuer,
            "RS256",
            {"kid": "k0"},
        )
        if (await asker.ask("GET", f"/v2/models/{OPEN}", f"Bearer {valid}")).status != 200:
            raise SystemExit("a valid token is refused, so nothing is proved by the others")
        alone = await longest_wait_s(asker, key, seconds)
        before_mib = gateway_mib(of.server)
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=attack, args=(of.server.http_address, attacks(of.issuer), there)
        )
        process.start()
        await asyncio.sleep(2.0)  # until it has begun
        beside = await longest_wait_s(asker, key, seconds)
        here.send(True)
        seen = await asyncio.to_thread(here.recv)
        process.join()
        print(table(("attack", "requests", "statuses"), [(n, sum(c.values()), str(c)) for n, c in seen.items()]))
        for name, (longest_s, median_s, count) in (("alone", alone), ("beside attacks", beside)):
            print(f"{name}: longest wait {longest_s:.3f} s, median {median_s * 1e3:.1f} ms, {count} requests")
        print(f"gateway: {before_mib:.0f} MiB before, {gateway_mib(of.server):.0f} MiB after")
        asker.close()


# How soon a key is worth nothing


@contextlib.asynccontextmanager
async def stored_keys(url: str) -> AsyncIterator[AccessKeys]:
    """The keys that the broker keeps, to be changed."""
    async with asyncio.TaskGroup() as background:
        bus = await Bus.connect(url, "strangers", background)
        keys = AccessKeys(bus)
        await keys.start(is_maker=True)
        yield keys
        await bus.close()


async def until_refused(ask: Callable[[], Awaitable[int]], removed: asyncio.Future[float]) -> float:
    """Seconds from the removal of the key until a request with it is refused; one is sent after the other."""
    while (status := await ask()) == 200:
        await asyncio.sleep(0.005)
    if status != 401 or not removed.done():
        raise SystemExit(f"a request with the key is answered with {status}")
    return time.monotonic() - removed.result()


async def record_status(client: Client, ids: Iterator[int], shown: str) -> int:
    """The status in the record of a new durable request."""
    id, stream = f"revoked-{next(ids)}", client.jetstream()
    await stream.publish(event(OPEN), infer_body(), headers={"Nats-Msg-Id": id, "Authorization": shown})
    while True:
        with contextlib.suppress(NotFoundError):
            record = await stream.get_last_msg(RESULT_STREAM, result(OPEN, id))
            return int((record.headers or {})["Weir-Status"])
        await asyncio.sleep(0.002)


async def status_of(asker: Asker, path: str, shown: str) -> int:
    """The status of a response over HTTP."""
    return (await asker.ask("GET", path, shown)).status


async def revoked() -> None:
    """Revokes a key ten times, and prints how long each door let it in."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        console = f"127.0.0.1:{probe.getsockname()[1]}"
    with world(gateways=GATEWAYS, console_port=int(console.rpartition(":")[2])) as of:
        client = await nats.connect(of.server.nats_url)
        askers = [Asker(of.server.http_address) for _ in range(CONNECTIONS)]
        page, ids = Asker(console), itertools.count()
        waits: dict[str, list[float]] = {"gateways": [], "durable": [], "console": []}
        async with stored_keys(of.server.nats_url) as keys:
            for number in range(TRIES):
                name = f"key-{number}"
                ring, key = KeyRing().create(name, ["caller", "reader"], time.time())
                await keys.change(name, lambda _, ring=ring: ring)  # type: ignore[misc]
                shown = f"Bearer {key}"
                doors: dict[str, list[Callable[[], Awaitable[int]]]] = {
                    "gateways": [partial(status_of, asker, f"/v2/models/{OPEN}", shown) for asker in askers],
                    "durable": [partial(record_status, client, ids, shown)],
                    "console": [partial(status_of, page, "/api/session", shown)],
                }
                asks = list(itertools.chain.from_iterable(doors.values()))

                async def all_let_in(asks: Sequence[Callable[[], Awaitable[int]]] = asks) -> bool:
                    return {await ask() for ask in asks} == {200}

                await until(all_let_in)
                removed: asyncio.Future[float] = asyncio.get_running_loop().create_future()
                tasks = {
                    door: [asyncio.create_task(until_refused(ask, removed)) for ask in each]
                    for door, each in doors.items()
                }
                await asyncio.sleep(_SETTLES_S)
                removed.set_result(time.monotonic())
                await keys.change(name, lambda _: KeyRing())
                for door, each in tasks.items():
                    waits[door].append(max(await asyncio.gather(*each)))
        rows = [(door, f"{statistics.median(each):.3f}", f"{max(each):.3f}") for door, each in waits.items()]
        print(table(("door", "median s", "longest s"), rows))
        for asker in (*askers, page):
            asker.close()
        await client.close()


def main() -> None:
    """Measures what is named, or everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["hidden", "attacks", "revoked", []], default=[])
    parser.add_argument("--tries", type=int, default=1000, help="of each request in `hidden`")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the honest client in `attacks`")
    options = parser.parse_args()
    what = options.what or ["hidden", "attacks", "revoked"]
    if "hidden" in what:
        asyncio.run(hidden(options.tries))
    if "attacks" in what:
        asyncio.run(attacked(options.seconds))
    if "revoked" in what:
        asyncio.run(revoked())


if __name__ == "__main__":
    main()

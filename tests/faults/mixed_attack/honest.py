"""Fifty honest clients that check every response: `python -m tests.faults.mixed_attack.honest PLACES` prints their ledger.

It is a separate process, so that the clients don't share an interpreter with the attackers. PLACES is JSON: `http`, `grpc`
("host:port"), `nats` (a URL), `seconds` and `seed`.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc
import nats
import numpy as np
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from tritonclient.grpc.service_pb2 import ModelInferRequest
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from tests.faults.mixed_attack.models import FP32, SIMPLE

HTTP_JSON, HTTP_BINARY, GRPC, NATS, DURABLE = "HTTP, JSON", "HTTP, 80 KB binary", "gRPC", "NATS", "durable"
CLIENTS = {HTTP_JSON: 22, HTTP_BINARY: 8, GRPC: 12, NATS: 5, DURABLE: 3}
"""Number of clients of each kind."""

PERIOD_S = 0.25
"""Interval between the requests of a client, which also waits for its last response."""

TIMEOUT_S = 30.0
"""Time after which a request without a response counts as lost."""

_ELEMENTS = 20_000


class Wrong(Exception):
    """A response with wrong contents."""


class Failed(Exception):
    """An error response; the text is its kind."""


@dataclass
class Ledger:
    """The results of the requests of one kind; latencies in seconds of those with correct responses."""

    times_s: list[float] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)


class Clients:
    """Fifty honest clients, each with one request in flight."""

    def __init__(self, places: dict[str, str], seconds: float, seed: int) -> None:
        self._places = places
        self._end_s = time.monotonic() + seconds
        self._random = random.Random(seed)
        self.ledgers = {kind: Ledger() for kind in CLIENTS}
        self._records: dict[str, asyncio.Future[Msg]] = {}
        self._nats: NatsClient
        self._stub: GRPCInferenceServiceStub

    async def run(self) -> None:
        """Send requests until the time is over, and wait for the last responses."""

        async def note(error: Exception) -> None:
            print(f"honest NATS client: {error!r}", file=sys.stderr)

        self._nats = await nats.connect(self._places["nats"], error_cb=note, max_reconnect_attempts=-1)
        await self._nats.subscribe(f"result.{SIMPLE}.*", cb=self._on_record)
        async with grpc.aio.insecure_channel(self._places["grpc"]) as channel:
            self._stub = GRPCInferenceServiceStub(channel)
            asks = {
                HTTP_JSON: lambda: _HttpClient(self._places["http"]).ask_json,
                HTTP_BINARY: lambda: _HttpClient(self._places["http"]).ask_binary,
                GRPC: lambda: self._ask_grpc,
                NATS: lambda: self._ask_nats,
                DURABLE: lambda: self._ask_durable,
            }
            async with asyncio.TaskGroup() as clients:
                for kind, count in CLIENTS.items():
                    for _ in range(count):
                        clients.create_task(self._go_on(self.ledgers[kind], asks[kind]()))
        await self._nats.close()

    async def _go_on(self, ledger: Ledger, ask: Callable[[random.Random], Awaitable[None]]) -> None:
        own = random.Random(self._random.random())
        await asyncio.sleep(own.random() * PERIOD_S)
        while time.monotonic() < self._end_s:
            began_s = time.monotonic()
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await ask(own)
                ledger.times_s.append(time.monotonic() - began_s)
            except Wrong as error:
                ledger.wrong[str(error)] += 1
            except Failed as error:
                ledger.failed[str(error)] += 1
            except (OSError, EOFError, asyncio.IncompleteReadError, TimeoutError, nats.errors.Error) as error:
                ledger.lost[type(error).__name__] += 1
            await asyncio.sleep(max(0.0, began_s + PERIOD_S - time.monotonic()))

    async def _ask_grpc(self, own: random.Random) -> None:
        first, second = _vectors(own)
        request = ModelInferRequest(model_name=SIMPLE)
        for name, vector in (("INPUT0", first), ("INPUT1", second)):
            request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
            request.raw_input_contents.append(vector.tobytes())
        try:
            answer = await self._stub.ModelInfer(request)
        except grpc.aio.AioRpcError as error:
            # What the library itself says of a connection that broke is no answer of the server.
            if error.code() is grpc.StatusCode.UNAVAILABLE and "onnect" in (error.details() or ""):
                raise ConnectionError from error
            raise Failed(f"{error.code().name}: {(error.details() or '')[:60]}") from error
        outputs = [np.frombuffer(content, np.int32) for content in answer.raw_output_contents]
        named = dict(zip((output.name for output in answer.outputs), outputs, strict=True))
        _check(named.get("OUTPUT0"), named.get("OUTPUT1"), first, second)

    async def _ask_nats(self, own: random.Random) -> None:
        first, second = _vectors(own)
        answer = await self._nats.request(f"infer.{SIMPLE}", _json_body(first, second), timeout=TIMEOUT_S)
        _check_json(answer.data, first, second)

    async def _ask_durable(self, own: random.Random) -> None:
        first, second = _vectors(own)
        id = f"honest-{own.getrandbits(64):016x}"
        record = self._records[id] = asyncio.get_running_loop().create_future()
        try:
            headers = {"Nats-Msg-Id": id}
            await self._nats.jetstream().publish(f"event.{SIMPLE}", _json_body(first, second), headers=headers)
            message = await record
        finally:
            del self._records[id]
        outcome = (message.headers or {}).get("Weir-Outcome", "")
        if outcome != "succeeded":
            raise Failed(f"{outcome}: {message.data[:60]!r}")
        _check_json(message.data, first, second)

    async def _on_record(self, message: Msg) -> None:
        record = self._records.get(message.subject.rpartition(".")[2])
        if record is not None and not record.done():
            record.set_result(message)


class _HttpClient:
    """One keep-alive connection, reopened when it breaks."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask_json(self, own: random.Random) -> None:
        first, second = _vectors(own)
        _check_json(await self._post(SIMPLE, [_json_body(first, second)]), first, second)

    async def ask_binary(self, own: random.Random) -> None:
        content = np.full(_ELEMENTS, own.random(), np.float32).tobytes()
        size = {"binary_data_size": len(content)}
        tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, _ELEMENTS], "parameters": size}
        header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        answer = await self._post(FP32, [header, content], f"Inference-Header-Content-Length: {len(header)}\r\n")
        if not answer.endswith(content):
            raise Wrong("another tensor")

    async def _post(self, model: str, body: list[bytes], headers: str = "") -> bytes:
        try:
            return await self._exchange(model, body, headers)
        except BaseException:
            if self._writer is not None:
                self._writer.close()
            self._reader = self._writer = None
            raise

    async def _exchange(self, model: str, body: list[bytes], headers: str) -> bytes:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, int(self._port))
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\n{headers}"
        self._writer.writelines([f"{head}Content-Length: {sum(map(len, body))}\r\n\r\n".encode(), *body])
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
        answer = await self._reader.readexactly(int(fields.get("content-length", 0)))
        if fields.get("connection") == "close":
            self._writer.close()
            self._reader = self._writer = None
        if not lines[0].startswith("http/1.1 200"):
            raise Failed(f"{lines[0][9:12]}: {answer[:80].decode(errors='replace')}")
        return answer


def _vectors(own: random.Random) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.array([own.randrange(1 << 20) for _ in range(16)], np.int32) for _ in range(2))  # type: ignore[return-value]


def _json_body(first: np.ndarray, second: np.ndarray) -> bytes:
    inputs = [
        {"name": name, "datatype": "INT32", "shape": [1, 16], "data": vector.tolist()}
        for name, vector in (("INPUT0", first), ("INPUT1", second))
    ]
    return json.dumps({"inputs": inputs}).encode()


def _check_json(answer: bytes, first: np.ndarray, second: np.ndarray) -> None:
    document = json.loads(answer)
    if "error" in document:
        raise Failed(str(document["error"])[:80])
    named = {output["name"]: np.array(output["data"]).reshape(-1) for output in document["outputs"]}
    _check(named.get("OUTPUT0"), named.get("OUTPUT1"), first, second)


def _check(total: np.ndarray | None, difference: np.ndarray | None, first: np.ndarray, second: np.ndarray) -> None:
    if not (np.array_equal(total, first + second) and np.array_equal(difference, first - second)):  # type: ignore[arg-type]
        raise Wrong("another sum or difference")


def main() -> None:
    """Run the clients and print the ledger of each kind, as JSON."""
    places = json.loads(sys.argv[1])
    clients = Clients(places, float(places["seconds"]), int(places["seed"]))
    asyncio.run(clients.run())
    print(json.dumps({kind: vars(ledger) for kind, ledger in clients.ledgers.items()}))


if __name__ == "__main__":
    main()

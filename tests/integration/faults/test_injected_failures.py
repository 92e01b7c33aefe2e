"""An unexpected exception at any contained site fails one request at most, even if its callback serves several.

The sites come from the code (`weir.runtime.containment.SITES`), so a new one is tested automatically. A round sends
requests of all kinds at once: HTTP, gRPC, streams, NATS, events, jobs, ensembles, sequences, and models that call
models.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nats
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from tests.support.clients.producers import Producer, int64_body
from tests.support.clients.stock import grpc_inputs
from tests.support.contained_sites import SITES
from tests.support.models.ensembles import NUMBERS, OUT, write_ensemble, write_steps
from tests.support.models.sequences import write_accumulator
from tests.support.models.zoo import write_identity, write_python_model, write_streamer
from tests.support.servers.weir_server import Server
from tests.support.waiting import wait_until

ROUND_TIMEOUT_S = 15.0
"""In which every request of a round must have ended, one way or the other."""

OF_JOBS = "weir.jobs."

WIDE = ("weir.scheduler.service.served_queues:", "weir.calls.outbox:")
"""Sites here serve several requests by nature: the queue of one model, or what one frame carries."""

broken: list[str] = []
"""What has raised when a request was lost. The rounds after it would take their time-outs, and say nothing."""

reached: set[str] = set()
"""Sites that have raised in some round."""

Asked = Callable[[], Coroutine[Any, Any, None]]


class Failure(Exception):
    """A request that has ended with an error."""


class Round:
    """Asks each kind of request of `server` once, and says what became of each."""

    def __init__(self, server: Server, batch_root: Path) -> None:
        self._server = server
        self._batch_root = batch_root
        self._numbers = itertools.count(1)
        self._threads = ThreadPoolExecutor(32)
        self._grpc = server.grpc()

    async def outcomes(self, with_job: bool = True) -> dict[str, str]:
        """By kind of request: "ok", "error: …" or "lost or wrong: …"."""
        client = await nats.connect(self._server.nats_url)
        producer = Producer(client)
        kinds: dict[str, Asked] = {
            **{f"http {number}": lambda: self._in_thread(self._http, "fast", 1) for number in range(4)},
            **{f"http large {number}": lambda: self._in_thread(self._http, "fast", 20_000) for number in range(2)},
            "http prepared": lambda: self._in_thread(self._binary),
            **{f"grpc {number}": lambda: self._in_thread(self._unary, "fast", "INT64") for number in range(2)},
            "grpc ensemble": lambda: self._in_thread(self._unary, "chain", "INT32"),
            "grpc decoupled": lambda: self._in_thread(self._stream),
            "asks another model": lambda: self._in_thread(self._asking),
            "sequence": lambda: self._in_thread(self._sequence),
            "nats": lambda: self._nats(client),
            "event": lambda: self._event(producer),
            "later": lambda: self._in_thread(self._later),
            "job": lambda: self._in_thread(self._job),
            "statistics": lambda: self._in_thread(self._get, "/v2/models/stats"),
            "index": lambda: self._in_thread(self._post, "/v2/repository/index", {}),
        }
        if not with_job:  # which takes two seconds, ten times as long as all the others together
            del kinds["job"]
        try:
            ended = await asyncio.gather(*(self._ended(ask) for ask in kinds.values()))
        finally:
            await client.close()
        return dict(zip(kinds, ended, strict=True))

    async def _ended(self, ask: Asked) -> str:
        try:
            await asyncio.wait_for(ask(), ROUND_TIMEOUT_S)
        except (TimeoutError, AssertionError) as error:
            return f"lost or wrong: {error}"
        except (Failure, InferenceServerException) as error:
            return f"error: {error}"[:300]
        return "ok"

    async def _in_thread(self, ask: Callable[..., None], *arguments: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, ask, *arguments)

    def _get(self, path: str) -> Any:
        return self._ask("GET", path)

    def _post(self, path: str, document: Any, **headers: str) -> Any:
        return self._ask("POST", path, json.dumps(document).encode(), **headers)

    def _ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Any:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        url = f"http://{self._server.http_place}{path}"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, named, method=method), timeout=30) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                raise Failure(error.read().decode()) from None
        return text if "Inference_Header_Content_Length" in headers else json.loads(text or b"null")

    def _http(self, model: str, size: int) -> None:
        values = [next(self._numbers)] * size
        tensor = {"name": "IN", "datatype": "INT64", "shape": [1, size], "data": values}
        assert self._post(f"/v2/models/{model}/infer", {"inputs": [tensor]})["outputs"][0]["data"] == values

    def _binary(self) -> None:
        value = np.array([next(self._numbers)], np.int64).tobytes()
        parameters = {"binary_data_size": len(value)}
        tensor = {"name": "IN", "datatype": "INT64", "shape": [1, 1], "parameters": parameters}
        header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        length = {"Inference_Header_Content_Length": str(len(header))}
        assert self._ask("POST", "/v2/models/fast/infer", header + value, **length).endswith(value)

    def _unary(self, model: str, datatype: str) -> None:
        value = np.array([[next(self._numbers)]], np.int64 if datatype == "INT64" else np.int32)
        given, wanted = ("IN", "OUT") if model == "fast" else ("X", "Y")
        answer = self._grpc.infer(model, grpc_inputs({given: value}), client_timeout=30)
        assert answer.as_numpy(wanted)[0, 0] == value[0, 0] + (2 if model == "chain" else 0)

    def _stream(self) -> None:
        plan = np.array([[json.dumps({"responses": 3, "size": 8})]], np.object_)
        ended: list[Any] = []
        with tritonclient.grpc.InferenceServerClient(self._server.grpc_place) as client:
            client.start_stream(lambda result, error: ended.append(error or result.as_numpy("NUMBER")[0, 0]))
            client.async_stream_infer("streamer", grpc_inputs({"PLAN": (plan, "BYTES")}))
            wait_until(lambda: len(ended) == 3 or any(isinstance(one, Exception) for one in ended))
            client.stop_stream()
        for one in ended:
            if isinstance(one, Exception):
                raise Failure(str(one))
        assert ended == [0, 1, 2]

    def _asking(self) -> None:
        value = next(self._numbers)
        tensor = {"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [value]}
        answer = self._post("/v2/models/forward/infer", {"inputs": [tensor], "parameters": {"way": "copy_int"}})
        assert answer["outputs"][0]["data"] == [value]

    def _sequence(self) -> None:
        number, total = next(self._numbers), 0.0
        for step in range(3):
            total += step
            tensor = {"name": "IN", "datatype": "FP32", "shape": [1, 1], "data": [step]}
            flags = {"sequence_id": number, "sequence_start": step == 0, "sequence_end": step == 2}
            answer = self._post("/v2/models/sum/infer", {"inputs": [tensor], "parameters": flags})
            assert {out["name"]: out["data"] for out in answer["outputs"]}["OUT"] == [total]

    async def _nats(self, client: Any) -> None:
        value = next(self._numbers)
        answer = json.loads((await client.request("infer.fast", int64_body(value), timeout=15)).data)
        if "error" in answer:
            raise Failure(answer["error"])
        assert answer["outputs"][0]["data"] == [value]

    async def _event(self, producer: Producer) -> None:
        id, value = f"{os.getpid()}-{next(self._numbers)}", next(self._numbers)
        await producer.send("event.fast", int64_body(value), Nats_Msg_Id=id)
        headers, body = await producer.record("fast", id)
        if headers["Weir-Outcome"] != "succeeded":
            raise Failure(f"{headers['Weir-Outcome']} {body.decode()}")
        assert json.loads(body)["outputs"][0]["data"] == [value]

    def _later(self) -> None:
        tensor = {"name": "IN", "datatype": "INT64", "shape": [1, 1], "data": [next(self._numbers)]}
        id = self._post("/v2/models/fast/infer", {"inputs": [tensor]}, Prefer="respond-async")["id"]
        reply = wait_until(lambda: reply if (reply := self._get(f"/v2/jobs/{id}"))["status"] not in ACTIVE else None)
        if reply["status"] != "succeeded":
            raise Failure(str(reply))

    def _job(self) -> None:
        folder = self._batch_root / str(next(self._numbers))
        folder.mkdir()
        lines = [json.dumps({"IN": [number]}) for number in range(5)]
        (folder / "in.jsonl").write_text("\n".join(lines))
        paths = {"input": str(folder / "in.jsonl"), "output": str(folder / "out")}
        id = self._post("/v2/jobs", {"model": "fast", **paths})["id"]
        reply = wait_until(lambda: reply if (reply := self._get(f"/v2/jobs/{id}"))["state"] not in ACTIVE else None)
        if reply["state"] != "succeeded" or reply["failed"]:
            raise Failure(str(reply))

    def close(self) -> None:
        """Closes the clients."""
        self._grpc.close()
        self._threads.shutdown()


ACTIVE = ("queued", "running")
"""States of jobs that have not ended."""


def write_models(root: Path) -> None:
    """One model for each kind of request of a round."""
    write_identity(root, "fast", "INT64", "dynamic_batching { }")
    write_steps(root)
    steps = [("step", {"IN": "X"}, {"OUT": "M"}), ("step", {"IN": "M"}, {"OUT": "Y"})]
    write_ensemble(root, "chain", NUMBERS, OUT, steps, 8)
    write_streamer(root, "streamer", "")
    write_accumulator(root, "sum")
    write_python_model(root, "forward", "forward", {"IN": ("INT32", [-1])}, {"OUT": ("INT32", [-1])}, 8)


class Injector:
    """Has sites of the server's roles raise, and hears which have."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(folder / "driver"))

    def order(self, sites: list[str], passages: int = 1) -> None:
        """Has each site raise once, in every role that has it; 0 passages take that back."""
        for process in self._folder.iterdir():
            if process.name != "driver":
                for site in sites:
                    try:
                        self._socket.sendto(f"{site} raise {passages} 0".encode(), str(process))
                    except ConnectionRefusedError:
                        pass  # of a process that has ended

    def raised(self) -> set[tuple[str, str]]:
        """(role, site) of each that has raised since."""
        found = set()
        while True:
            try:
                role, _, site = self._socket.recv(300).decode().split()
            except BlockingIOError:
                return found
            found.add((role, site))

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Round, Injector]]:
    folder = tmp_path_factory.mktemp("contained")
    (folder / "models").mkdir()
    write_models(folder / "models")
    (folder / "root").mkdir()
    injector = Injector(folder / "points")
    environment = {"WEIR_PAUSE_POINTS": str(folder / "points")}
    server = Server(folder, folder / "models", f"--batch-root={folder / 'root'}", environment=environment)
    asking = Round(server, folder / "root")
    try:
        yield server, asking, injector
        asking.close()
        assert server.in_flight() == 0
        assert server.stop(timeout_s=20) == 0
    finally:
        server.close()
        injector.close()


def assert_whole(asking: Round) -> None:
    """Every kind of request is answered, and right; what a failure has put off may need a moment."""
    wait_until(lambda: set(asyncio.run(asking.outcomes()).values()) == {"ok"}, 30)


def inject(driven: tuple[Server, Round, Injector], sites: list[str]) -> None:
    """Asks a round while these sites raise once each: no more requests fail than sites have raised, and none is lost."""
    server, asking, injector = driven
    if broken:
        pytest.fail(f"not asked, for the server was left broken by {broken[0]}")
    pids = server.pids()
    injector.order(sites)
    outcomes = asyncio.run(asking.outcomes(with_job=any(site.startswith(OF_JOBS) for site in sites)))
    injector.order(sites, passages=0)
    raised = injector.raised()
    lost = {kind: outcome for kind, outcome in outcomes.items() if outcome.startswith("lost")}
    if lost:
        broken.append(str(sorted(raised)))
    assert not lost, raised
    failed = [outcome for outcome in outcomes.values() if outcome != "ok"]
    assert len(failed) <= sum(20 if site.startswith(WIDE) else 1 for _, site in raised), (raised, outcomes)
    assert server.pids() == pids, f"a role has ended: {server.log()[-3000:]}"
    reached.update(site for _, site in raised)


def groups() -> list[list[str]]:
    """All sites, about four at a time, those of jobs apart.

    Neighbours are in different groups: a site must not raise while it ends the request of another that has.
    """
    found = []
    for of_jobs in (False, True):
        sites = sorted(site for site in SITES if site.startswith(OF_JOBS) is of_jobs)
        count = -(-len(sites) // 4)
        found += [sites[start::count] for start in range(count)]
    return found


def test_all_is_answered_while_nothing_fails(driven: tuple[Server, Round, Injector]) -> None:
    outcomes = asyncio.run(driven[1].outcomes())
    assert set(outcomes.values()) == {"ok"}, outcomes


@pytest.mark.parametrize("sites", groups(), ids=lambda sites: sites[0])
def test_failures_end_one_request_each_at_most(driven: tuple[Server, Round, Injector], sites: list[str]) -> None:
    inject(driven, sites)


def test_all_is_answered_after_the_failures(driven: tuple[Server, Round, Injector]) -> None:
    assert not broken
    assert_whole(driven[1])


def test_the_sites_of_a_request_are_reached() -> None:
    """The others serve what a round has not: lost connections, caches, other hosts, reloads."""
    assert len(reached) >= len(SITES) / 4, sorted(SITES.keys() - reached)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("site", sorted(SITES))
def test_a_failure_leaves_everything_whole(driven: tuple[Server, Round, Injector], site: str) -> None:
    inject(driven, [site])
    assert_whole(driven[1])

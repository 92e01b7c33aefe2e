"""Requests of NATS clients on `infer.<model>`, as `nats request` and nats-py send them."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgpack
import nats
import numpy as np
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError

from tests.support.models.zoo import write_identity, write_slow, write_streamer, write_versions
from tests.support.servers.weir_server import Server

TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("nats_door")
    write_identity(folder / "models", "identity", "INT32", "dynamic_batching { }")
    write_identity(folder / "models", "dotted.name", "INT32")
    write_versions(folder / "models", "versions", "version_policy { all { } }")
    write_streamer(folder / "models", "streamer", "")
    write_slow(folder / "models")
    started = Server(folder, folder / "models")
    try:
        yield started
        assert started.in_flight() == 0
        assert started.stop() == 0
        assert "Traceback" not in started.log()
    finally:
        started.close()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    connected = await nats.connect(server.nats_url)
    yield connected
    await connected.close()


def document(values: list[Any], name: str = "IN", datatype: str = "INT32", **more: Any) -> bytes:
    row = {"name": name, "datatype": datatype, "shape": [1, len(values)], "data": values}
    return json.dumps({"inputs": [row], **more}).encode()


def plan(**what: Any) -> bytes:
    return document([json.dumps(what)], "PLAN", "BYTES")


class Replies:
    """What comes on a reply subject of its own, until the answer that is flagged as the last."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._arrived: asyncio.Queue[Msg] = asyncio.Queue()
        self.subject = client.new_inbox()

    async def ask(self, model: str, body: bytes, **headers: str) -> None:
        self._subscription = await self._client.subscribe(self.subject, cb=self._arrived.put)
        named = {f"Weir-{name.replace('_', '-').title()}": value for name, value in headers.items()}
        await self._client.publish(f"infer.{model}", body, self.subject, headers=named or None)

    async def next(self) -> Msg:
        return await asyncio.wait_for(self._arrived.get(), TIMEOUT_S)

    async def rest(self) -> list[Msg]:
        messages = [await self.next()]
        while messages[-1].headers["Weir-Final"] == "false":
            messages.append(await self.next())
        return messages

    @property
    def waiting(self) -> int:
        return self._arrived.qsize()


async def test_json_is_answered_with_json(client: Client) -> None:
    answer = await client.request("infer.identity", document([1, 2, 3], id="a"), timeout=TIMEOUT_S)
    told = json.loads(answer.data)
    assert told["id"] == "a"
    assert told["model_name"] == "identity"
    assert told["outputs"] == [{"name": "OUT", "datatype": "INT32", "shape": [1, 3], "data": [1, 2, 3]}]
    assert answer.headers["Weir-Final"] == "true"
    assert answer.headers["Weir-Outcome"] == "succeeded"
    assert answer.headers["Content-Type"] == "application/json"


async def test_binary_tensors_both_ways(client: Client) -> None:
    content = np.arange(30_000, dtype=np.int32).tobytes()
    row = {"name": "IN", "datatype": "INT32", "shape": [1, 30_000], "parameters": {"binary_data_size": len(content)}}
    header = json.dumps({"inputs": [row], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(header))}
    answer = await client.request("infer.identity", header + content, timeout=TIMEOUT_S, headers=headers)
    assert answer.headers["Content-Type"] == "application/octet-stream"
    assert answer.data[int(answer.headers["Inference-Header-Content-Length"]) :] == content


async def test_msgpack_both_ways_also_of_errors(client: Client) -> None:
    content = np.arange(30_000, dtype=np.int32).tobytes()
    row = {"name": "IN", "datatype": "INT32", "shape": [1, 30_000], "data": content}
    headers = {"Content-Type": "application/msgpack"}
    answers = {}
    for subject in ("infer.identity", "infer.unknown"):
        body = msgpack.packb({"id": "a", "inputs": [row]})
        answer = await client.request(subject, body, timeout=TIMEOUT_S, headers=headers)
        assert answer.headers["Content-Type"] == "application/msgpack"
        answers[answer.headers["Weir-Outcome"]] = msgpack.unpackb(answer.data)
    assert answers["succeeded"]["id"] == "a"
    assert answers["succeeded"]["outputs"] == [row | {"name": "OUT"}]
    assert answers["failed"] == {"error": "Request for unknown model: 'unknown' is not found"}


async def test_names_are_escaped_and_versions_named(client: Client) -> None:
    answer = await client.request("infer.dotted=2Ename", document([4]), timeout=TIMEOUT_S)
    assert json.loads(answer.data)["model_name"] == "dotted.name"
    body = json.dumps({"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [10.0]}]}).encode()
    for version, zeros in ((1, ""), (2, "0"), (3, "00")):
        answer = await client.request(f"infer.versions.v{zeros}{version}", body, timeout=TIMEOUT_S)
        told = json.loads(answer.data)
        assert (told["model_version"], told["outputs"][0]["data"]) == (str(version), [10.0 + version])


@pytest.mark.parametrize(
    ("subject", "body", "headers", "code", "text"),
    [
        ("unknown", document([1]), {}, "404", "Request for unknown model: 'unknown' is not found"),
        ("identity.v9", document([1]), {}, "404", "Request for unknown model: 'identity' version 9 is not found"),
        ("identity.latest", document([1]), {}, "400", "failed to get model version from specified version string"),
        ("identity", b"{", {}, "500", "failed to parse the request JSON buffer"),
        ("identity", document([1], "WRONG"), {}, "400", "unexpected inference input 'WRONG' for model 'identity'"),
        ("identity", document([1]), {"Inference-Header-Content-Length": "x"}, "400", "Unable to parse"),
        ("identity", document([1]), {"Weir-Priority": "high"}, "400", "Unable to parse header 'weir-priority'"),
        ("identity", document([1]), {"Weir-Window": "-1"}, "400", "Unable to parse header 'weir-window'"),
        ("identity", document([1]), {"Weir-Deadline-Ms": "1"}, "503", "Request timeout expired"),
    ],
)
async def test_what_is_refused_has_tritons_text_and_the_service_apis_headers(
    client: Client, subject: str, body: bytes, headers: dict[str, str], code: str, text: str
) -> None:
    answer = await client.request(f"infer.{subject}", body, timeout=TIMEOUT_S, headers=headers or None)
    assert text in json.loads(answer.data)["error"]
    assert text in answer.headers["Nats-Service-Error"]
    assert answer.headers["Nats-Service-Error-Code"] == code
    assert (answer.headers["Weir-Outcome"], answer.headers["Weir-Final"]) == ("failed", "true")


@pytest.mark.parametrize("bare_end", [False, True])
async def test_a_decoupled_model_sends_all_its_responses_and_flags_the_last(client: Client, bare_end: bool) -> None:
    replies = Replies(client)
    await replies.ask("streamer", plan(responses=5, bare_end=bare_end))
    messages = await replies.rest()
    numbers = [json.loads(message.data)["outputs"][0]["data"][0] for message in messages if message.data]
    assert numbers == [0, 1, 2, 3, 4]
    assert len(messages) == 5 + bare_end
    assert [message.headers["Weir-Final"] for message in messages[:-1]] == ["false"] * (len(messages) - 1)


async def test_a_window_keeps_answers_back_until_they_are_acknowledged(client: Client) -> None:
    replies = Replies(client)
    await replies.ask("streamer", plan(responses=10), window="2")
    first, second = await replies.next(), await replies.next()
    # Whatever would come without being asked for has come before the answer to a later request.
    await client.request("infer.identity", document([1]), timeout=TIMEOUT_S)
    assert replies.waiting == 0
    taken = [first, second]
    while taken[-1].headers["Weir-Final"] == "false":
        await client.publish(taken[-1].reply)
        taken.append(await replies.next())
    assert len(taken) == 10


async def test_a_caller_that_never_acknowledges_is_given_up(client: Client) -> None:
    replies = Replies(client)
    await replies.ask("streamer", plan(responses=40, size=500_000), window="1")
    messages = await replies.rest()
    assert len(messages) == 2
    assert "fallen behind" in messages[-1].headers["Nats-Service-Error"]


async def test_a_model_learns_that_its_caller_has_gone(server: Server, client: Client, tmp_path: Path) -> None:
    leaving = await nats.connect(server.nats_url)
    await Replies(leaving).ask("streamer", plan(until_cancelled=str(tmp_path / "sent")))
    while not (tmp_path / "sent.begun").exists():
        await asyncio.sleep(0.01)
    await leaving.close()
    async with asyncio.timeout(TIMEOUT_S):
        while not (tmp_path / "sent").exists():
            await asyncio.sleep(0.01)


async def test_an_answer_that_the_broker_does_not_take_is_an_error(client: Client) -> None:
    replies = Replies(client)
    await replies.ask("streamer", plan(responses=1, size=6_000_000))
    (message,) = await replies.rest()
    assert "larger than the message broker takes" in message.headers["Nats-Service-Error"]


async def test_many_at_once(client: Client) -> None:
    bodies = [document([number]) for number in range(500)]
    answers = await asyncio.gather(*(client.request("infer.identity", b, timeout=TIMEOUT_S) for b in bodies))
    assert [json.loads(a.data)["outputs"][0]["data"][0] for a in answers] == list(range(500))


async def test_it_is_a_micro_service(client: Client) -> None:
    await client.request("infer.identity", document([1]), timeout=TIMEOUT_S)
    ping = json.loads((await client.request("$SRV.PING.weir", timeout=TIMEOUT_S)).data)
    assert (ping["name"], ping["type"]) == ("weir", "io.nats.micro.v1.ping_response")
    info = json.loads((await client.request(f"$SRV.INFO.weir.{ping['id']}", timeout=TIMEOUT_S)).data)
    plain = ["infer.*", "infer.*.*"]
    assert [row["subject"] for row in info["endpoints"]] == [*plain, *(f"by.*.{subject}" for subject in plain)]
    assert {row["queue_group"] for row in info["endpoints"]} == {"weir"}
    stats = json.loads((await client.request("$SRV.STATS", timeout=TIMEOUT_S)).data)
    assert stats["endpoints"][0]["num_requests"] > 0
    assert stats["endpoints"][0]["average_processing_time"] > 0


async def test_a_gateway_that_stops_answers_what_was_on_its_way(server: Server, client: Client) -> None:
    async def ask_on() -> int:
        answered = 0
        while True:
            try:
                answer = await client.request("infer.identity", document([answered]), timeout=TIMEOUT_S)
            except NoRespondersError:  # told at once: no gateway is there
                return answered
            assert json.loads(answer.data)["outputs"][0]["data"] == [answered]
            answered += 1

    asking = [asyncio.create_task(ask_on()) for _ in range(20)]
    await asyncio.sleep(0.1)
    server.kill("gateway", signal.SIGTERM)
    assert all(await asyncio.gather(*asking))
    await asyncio.to_thread(server.wait_ready)

"""Durable requests of producers, from stream QUEUE to their terminal records."""

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest

from tests.support.clients.producers import Producer, int64_body, producer, value_of
from tests.support.models.zoo import write_identity, write_slow, write_streamer
from tests.support.servers.nats import publish_raw
from tests.support.servers.weir_server import Server
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def durable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("durable")
    write_identity(folder / "models", "fast", "INT64", more="dynamic_batching { }")
    write_slow(folder / "models")
    write_streamer(folder / "models", "stream", "")
    with Server(folder, folder / "models") as started:
        yield started


async def test_json_is_answered_and_recorded_once(durable: Server) -> None:
    async with producer(durable.nats_url) as to:
        headers, body = await to.ask("event.fast", int64_body(41), Nats_Msg_Id="json-1", Weir_Tenant="ann")
        assert value_of(body) == 41
        assert headers["Weir-Outcome"] == "succeeded"
        assert headers["Weir-Final"] == "true"
        assert (headers["Weir-Id"], headers["Weir-Tenant"], headers["Weir-Attempts"]) == ("json-1", "ann", "1")
        recorded, same = await to.record("fast", "json-1")
        assert same == body
        assert recorded["Weir-Outcome"] == "succeeded"
        # The same message again is one message; and the broker's window apart, one record.
        assert (await to.jetstream.publish("event.fast", int64_body(41), headers={"Nats-Msg-Id": "json-1"})).duplicate


async def test_binary_tensors_and_msgpack(durable: Server) -> None:
    async with producer(durable.nats_url) as to:
        head = (
            b'{"id":"bin-1","inputs":[{"name":"IN","datatype":"INT64","shape":[1,2],"parameters":{"binary_data_size":16}}],'
            b'"outputs":[{"name":"OUT","parameters":{"binary_data":true}}]}'
        )
        values = np.array([5, 6], np.int64).tobytes()
        for number in (1, 2):  # the second time it is prepared
            sent = head if number == 1 else head.replace(b'"id":"bin-1",', b"")
            for _ in range(number):
                headers, body = await to.ask(
                    "event.fast.v1", sent + values, Inference_Header_Content_Length=str(len(sent))
                )
                assert body[int(headers["Inference-Header-Content-Length"]) :] == values
                assert headers["Weir-Model-Version"] == "1"
        assert (await to.record("fast", "bin-1"))[1].endswith(values)
        packed = msgpack.packb(
            {"id": "mp-1", "inputs": [{"name": "IN", "datatype": "INT64", "shape": [1, 1], "data": [8]}]}
        )
        headers, body = await to.ask("batch.fast", packed, Content_Type="application/msgpack")
        assert headers["Content-Type"] == "application/msgpack"
        assert headers["Weir-Id"] == "mp-1"
        assert msgpack.unpackb(body)["outputs"][0]["name"] == "OUT"


async def test_what_can_not_be_read_is_dead_lettered(durable: Server) -> None:
    async with producer(durable.nats_url) as to:
        headers, body = await to.ask("event.fast", b"{no json", Nats_Msg_Id="bad-1")
        assert (headers["Weir-Outcome"], headers["Weir-Status"]) == ("dead-lettered", "400"), "the producer's error"
        assert b"failed to parse" in body
        assert (await to.record("fast", "bad-1"))[0]["Weir-Outcome"] == "dead-lettered"
        letter = await to.jetstream.get_last_msg("DEAD", "dead.fast")
        assert letter.data == b"{no json"
        assert letter.headers["Weir-Dead-Id"] == "bad-1"
        assert letter.headers["Weir-Dead-Subject"] == "event.fast"
        assert "failed to parse" in letter.headers["Weir-Dead-Reason"]
        headers, body = await to.ask("event.fast", int64_body(1), Nats_Msg_Id="bad-2", Weir_Priority="high")
        assert headers["Weir-Outcome"] == "dead-lettered"
        assert b"weir-priority" in body


async def test_what_the_model_refuses_fails(durable: Server) -> None:
    async with producer(durable.nats_url) as to:
        headers, body = await to.ask("event.fast", int64_body(1, name="NO"), Nats_Msg_Id="no-1")
        assert (headers["Weir-Outcome"], headers["Weir-Status"]) == ("failed", "400")
        assert b"NO" in body
        shape = int64_body(1).replace(b"[1, 1]", b"[1, 1, 1]")
        headers, body = await to.ask("event.fast", shape, Nats_Msg_Id="no-2")
        assert headers["Weir-Status"] == "400"
        assert b"[request id: no-2] " in body
        headers, body = await to.ask("event.fast", shape.replace(b"{", b'{"id":"no-3",', 1))
        assert b"[request id: no-3] " in body


async def test_a_deadline_expires(durable: Server) -> None:
    async with producer(durable.nats_url) as to:
        passed = str(int(time.time() * 1000) - 5)
        headers, _ = await to.ask("event.fast", int64_body(1), Nats_Msg_Id="late-1", Weir_Deadline_Ms=passed)
        assert headers["Weir-Outcome"] == "expired"


async def test_another_request_of_the_same_id_is_refused(durable: Server) -> None:
    async with producer(durable.nats_url) as to:
        await to.ask("event.fast", int64_body(1, id="twin"))
        again, body = await to.ask("event.fast", int64_body(1, id="twin"))
        assert again["Weir-Outcome"] == "succeeded"
        assert value_of(body) == 1
        other, _ = await to.ask("event.fast", int64_body(2, id="twin"))
        assert (other["Weir-Outcome"], other["Weir-Status"]) == ("dead-lettered", "409")
        assert value_of((await to.record("fast", "twin"))[1]) == 1


async def test_cancelled_requests_stay_so(durable: Server) -> None:
    async with producer(durable.nats_url) as to:
        inbox, came = await to.answers()
        await to.cancel("slow", "gone")
        body = b'{"inputs":[{"name":"VALUE","datatype":"INT64","shape":[1,1],"data":[1]},' + (
            b'{"name":"DELAY_MS","datatype":"FP32","shape":[1,1],"data":[1]}]}'
        )
        await to.send("event.slow", body, Nats_Msg_Id="gone", Weir_Reply_To=inbox)
        await eventually(lambda: came)
        assert came[0][0]["Weir-Outcome"] == "cancelled"


async def test_bodies_in_the_object_store(durable: Server) -> None:
    async with producer(durable.nats_url) as to:
        store = await to.jetstream.object_store("requests")
        count = 1_500_000
        head = (
            b'{"inputs":[{"name":"IN","datatype":"INT64","shape":[1,%d],"parameters":{"binary_data_size":%d}}],'
            b'"outputs":[{"name":"OUT","parameters":{"binary_data":true}}]}' % (count, count * 8)
        )
        values = np.arange(count, dtype=np.int64).tobytes()
        await store.put("big", head + values)
        inbox, came = await to.answers()
        length = str(len(head))
        await to.send("event.fast", b"", Nats_Msg_Id="big-1", Weir_Object="big", Weir_Reply_To=inbox,
                      Inference_Header_Content_Length=length)  # fmt: skip
        small, _ = await to.ask("event.fast", int64_body(3), Nats_Msg_Id="small-1")
        assert small["Weir-Outcome"] == "succeeded"
        await eventually(lambda: came)
        assert came[0][0]["Weir-Outcome"] == "succeeded"
        results = await to.jetstream.object_store("results")
        answer = (await results.get(came[0][0]["Weir-Object"])).data
        assert answer[int(came[0][0]["Inference-Header-Content-Length"]) :] == values
        missing, body = await to.ask("event.fast", b"", Nats_Msg_Id="big-2", Weir_Object="nowhere")
        assert missing["Weir-Outcome"] == "dead-lettered"
        assert b"nowhere" in body


def _lies(described: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Descriptions of an object that a client has changed: (what was changed, the description)."""
    for name in ("digest", "size", "chunks", "nuid"):
        yield f"without-{name}", json.dumps({key: value for key, value in described.items() if key != name}).encode()
        yield f"odd-{name}", json.dumps({**described, name: "x"}).encode()
    yield "too-small", json.dumps({**described, "size": 10}).encode()
    yield "link", json.dumps({**described, "options": {"link": {"bucket": "models", "name": "x"}}}).encode()
    yield "odd-options", json.dumps({**described, "options": "x"}).encode()
    yield "a-list", b"[1]"
    yield "not-text", b"\xff\xfe"


async def test_an_object_that_can_not_be_read_ends_its_request_and_nothing_else(durable: Server) -> None:
    pid = durable.pids()["durable"]
    async with producer(durable.nats_url) as to:
        store = await to.jetstream.object_store("requests")
        names = [name for name, _ in _lies({})]
        for name in names:
            info = await store.put(name, int64_body(5))
            subject = f"$O.requests.M.{base64.urlsafe_b64encode(name.encode()).decode()}"
            await to.jetstream.publish(subject, dict(_lies(info.as_dict()))[name])
            await to.send("event.fast", b"", Nats_Msg_Id=f"lie-{name}", Weir_Object=name)
        headers, _ = await to.ask("event.fast", int64_body(6), Nats_Msg_Id="beside-lies")
        assert headers["Weir-Outcome"] == "succeeded"
        outcomes = {name: (await to.record("fast", f"lie-{name}"))[0]["Weir-Outcome"] for name in names}
        harmless = {"without-chunks", "odd-chunks", "odd-options"}
        assert {name for name, outcome in outcomes.items() if outcome == "succeeded"} == harmless, outcomes
        assert set(outcomes.values()) == {"succeeded", "dead-lettered"}
        _, body = await to.record("fast", "lie-too-small")
        assert b"longer than the 10 bytes" in body
    assert durable.pids()["durable"] == pid


async def send_many(to: Producer, ids: range, model: str = "fast") -> None:
    gate = asyncio.Semaphore(64)

    async def one(number: int) -> None:
        async with gate:
            await to.send(f"event.{model}", int64_body(number), Nats_Msg_Id=f"n{number}")

    await asyncio.gather(*(one(number) for number in ids))


async def assert_exactly_once(to: Producer, ids: range, model: str = "fast") -> None:
    """The ledger: every request that was accepted has one record, and the right one."""
    wanted = {f"n{number}": number for number in ids}
    records = [(id, answer) for id, answer in await to.records(model) if id in wanted]
    assert len(records) == len(wanted), f"lost {len(wanted) - len({id for id, _ in records})}"
    assert {id: value_of(body) for id, (_, body) in records} == wanted


@pytest.mark.timeout(60)
@pytest.mark.parametrize("role", ["durable", "gateway"])
async def test_nothing_is_lost_when_a_process_is_killed(durable: Server, role: str) -> None:
    ids = range(1000) if role == "durable" else range(1000, 2000)
    async with producer(durable.nats_url) as to:
        before = await to.count("RESULT")
        sending = asyncio.create_task(send_many(to, ids))
        while await to.count("RESULT") < before + 200:
            await asyncio.sleep(0.01)
        durable.kill(role)
        await sending
        await to.settled(before + 1000)
        await assert_exactly_once(to, ids)
    durable.wait_ready()


async def test_subjects_that_are_not_utf8_leave_the_queue(durable: Server) -> None:
    async with producer(durable.nats_url) as to:
        await to.ask("event.fast", int64_body(1), Nats_Msg_Id="before-bytes")
        connections = durable.log().count("connected to nats-server again")
        publish_raw(durable.nats_url, (b"event.fast.\xff", b"", int64_body(2)), (b"event.\xff", b"", int64_body(3)))
        headers, body = await to.ask("event.fast", int64_body(4), Nats_Msg_Id="after-bytes")
        assert (headers["Weir-Outcome"], value_of(body)) == ("succeeded", 4)
        async with asyncio.timeout(15):
            while True:
                state = (await to.jetstream.stream_info("QUEUE", subjects_filter="event.>")).state
                if set(state.subjects or {}) <= {"event.=EF=BF=BD"}:
                    break
                await asyncio.sleep(0.05)
        letter = await to.jetstream.get_last_msg("DEAD", "dead.fast")
        assert letter.data == int64_body(2)
    assert durable.log().count("connected to nats-server again") == connections

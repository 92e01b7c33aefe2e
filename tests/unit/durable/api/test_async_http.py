"""Requests that are answered later, over HTTP, with a real queue."""

import asyncio
import json
import struct
import zlib
from pathlib import Path

import pytest

from tests.support.clients.nats_flush import flush
from tests.support.gateway.async_frontend import Door, document, run
from tests.support.servers.full_disk import FREE_BYTES, full_disk
from weir.bus.nats.connection import Message
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.streams.acked_publisher import AckedPublisher
from weir.gateway.access import Access
from weir.schemas.core.errors import invalid


def test_an_accepted_request_is_on_disk_and_answered_later(nats_url: str) -> None:
    async def scenario(door: Door) -> None:
        door.intake.takes.clear()
        answer = await door.infer(document(1, 2, id="mine"))
        id = answer.document["id"]
        assert (answer.status, answer.document["status"]) == (202, "queued")
        assert answer.headers["location"] == f"/v2/jobs/{id}"
        assert answer.headers["preference-applied"] == "respond-async"
        assert answer.headers["retry-after"] == "1"
        assert await door.queued() == 1
        early = await door.ask("GET", f"/v2/jobs/{id}/result")
        assert (early.status, early.headers["retry-after"]) == (409, "1")
        door.intake.takes.set()
        told = await door.done(id)
        assert (told["id"], told["model"], told["version"], told["status"]) == (id, "m", "2", "succeeded")
        assert (told["attempts"], told["accepted"]) == (1, "1970-01-01T00:00:00.005Z")
        result = await door.ask("GET", f"/v2/jobs/{id}/result")
        assert (result.status, result.headers["content-type"]) == (200, "application/json")
        assert result.document["id"] == "mine"
        assert result.document["outputs"][0]["data"] == [1.0, 2.0]

    run(nats_url, scenario)


def test_what_travels_along_and_comes_back_in_binary(nats_url: str) -> None:
    async def scenario(door: Door) -> None:
        content = struct.pack("<2f", 3, 4)
        head = document(0, parameters={"binary_data_output": True})
        head["inputs"] = [{"name": "IN", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}]
        text = json.dumps(head).encode()
        headers = {
            "Inference_Header_Content_Length": str(len(text)),
            "Content_Encoding": "gzip",
            "Weir_Tenant": "acme",
            "Weir_Deadline_Ms": "99999999999999",
            "Weir_Priority": "3",
            "Weir_Result_Ttl_Secs": "60",
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "Prefer": "handling=lenient, Respond-Async; why=not, wait=5",
        }
        body = zlib.compress(text + content)
        answer = await door.ask("POST", "/v2/models/m/versions/02/infer", body, **headers)
        assert answer.status == 202, answer
        await door.done(answer.document["id"])
        [seen] = door.intake.seen
        expected = {
            "nats-msg-id": answer.document["id"],
            "weir-model-version": "2",
            "weir-tenant": "acme",
            "weir-deadline-ms": "99999999999999",
            "weir-priority": "3",
            "weir-result-ttl-secs": "60",
            "traceparent": headers["traceparent"],
            "inference-header-content-length": str(len(text)),
        }
        assert {name: seen.get(name) for name in expected} == expected
        result = await door.ask("GET", f"/v2/jobs/{answer.document['id']}/result")
        assert result.headers["content-type"] == "application/octet-stream"
        length = int(result.headers["inference-header-content-length"])
        assert result.body[length:] == content
        packed = await door.ask("GET", f"/v2/jobs/{answer.document['id']}/result", Accept_Encoding="gzip")
        assert zlib.decompress(packed.body, 31) == result.body

    run(nats_url, scenario)


def test_bad_requests_are_refused_at_the_door_and_nothing_is_stored(nats_url: str) -> None:
    async def scenario(door: Door) -> None:
        door.intake.takes.clear()
        shared = document(1)
        place = {"shared_memory_region": "r", "shared_memory_byte_size": 4}
        shared["inputs"][0] = {"name": "IN", "datatype": "FP32", "shape": [1], "parameters": place}
        cases = [
            (await door.infer(b"{"), 500, "JSON"),
            (await door.infer({"inputs": []}), 400, "expected 1 inputs but got 0"),
            (await door.infer(document(1), Weir_Deadline_Ms="soon"), 400, "Weir-Deadline-Ms"),
            (await door.infer(document(1), Weir_Priority="-1"), 400, "weir-priority"),
            (await door.infer(document(1), Weir_Tenant="x" * 129), 400, "weir-tenant"),
            (await door.infer(document(1), Weir_Result_Ttl_Secs="0"), 400, "weir-result-ttl-secs"),
            (await door.infer(document(1), Idempotency_Key="x" * 256), 400, "Idempotency-Key"),
            (await door.infer(document(1), Idempotency_Key=""), 400, "Idempotency-Key"),
            (await door.infer(document(1), Content_Encoding="br"), 501, "compression"),
            (await door.infer(document(1), Content_Encoding="gzip"), 400, "decompression"),
            (await door.infer(document(1), Weir_Callback_Url="http://127.0.0.1/"), 400, "not allowed on this server"),
            (await door.infer(document(1), Weir_Callback_Subject="live.m"), 400, "callback subject"),
            (await door.infer(document(1), Weir_Callback_Subject="answers.*"), 400, "callback subject"),
            (await door.infer(shared), 400, "shared memory"),
            (await door.ask("POST", "/v2/models/x/infer", b"{}", Prefer="respond-async"), 404, "unknown model"),
            (await door.ask("PUT", "/v2/models/m/infer", b"{}", Prefer="respond-async"), 405, "Method Not Allowed"),
        ]
        for answer, status, text in cases:
            assert answer.status == status, (answer, text)
            assert text in answer.document["error"], answer
        assert await door.queued() == 0

    run(nats_url, scenario)


async def accepted_binary(door: Door, content: bytes) -> str:
    head = document(0, parameters={"binary_data_output": True})
    size = {"binary_data_size": len(content)}
    head["inputs"] = [{"name": "IN", "datatype": "FP32", "shape": [len(content) // 4], "parameters": size}]
    text = json.dumps(head).encode()
    return await door.accepted(text + content, Inference_Header_Content_Length=str(len(text)))


def test_requests_and_answers_larger_than_a_message_lie_in_object_stores(nats_url: str) -> None:
    async def scenario(door: Door) -> None:
        door.intake.large = True
        content = bytes(9 << 20)
        id = await accepted_binary(door, content)
        await door.done(id)
        assert door.intake.seen[0]["weir-object"].startswith(id)
        result = await door.ask("GET", f"/v2/jobs/{id}/result")
        assert result.body[int(result.headers["inference-header-content-length"]) :] == content
        assert (await door.ask("DELETE", f"/v2/jobs/{id}")).status == 204
        assert (await door.ask("GET", f"/v2/jobs/{id}/result")).status == 404

    run(nats_url, scenario)


def test_a_body_stays_where_the_first_acknowledgement_of_its_request_is_lost(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[int] = []
    heard = AckedPublisher._on_ack

    def lose_the_first(publisher: AckedPublisher, message: Message) -> None:
        if lost:
            heard(publisher, message)
            return
        lost.append(int(message.subject.rpartition(".")[2]))
        publisher._again(lost[0])  # as when the broker is back

    monkeypatch.setattr(AckedPublisher, "_on_ack", lose_the_first)

    async def scenario(door: Door) -> None:
        door.intake.large = True
        door.intake.takes.clear()
        await asyncio.sleep(0.6)  # the fetch that is under way ends
        id = await accepted_binary(door, bytes(9 << 20))
        door.intake.takes.set()
        assert (await door.done(id))["status"] == "succeeded"

    run(nats_url, scenario)
    assert lost


def test_an_idempotency_key_is_stored_once(nats_url: str) -> None:
    async def scenario(door: Door) -> None:
        door.intake.answers.clear()
        answers = await asyncio.gather(*(door.infer(document(1), Idempotency_Key="order 1") for _ in range(8)))
        assert {answer.status for answer in answers} == {202}
        [location] = {answer.headers["location"] for answer in answers}
        other = await door.infer(document(2), Idempotency_Key="order 1")
        assert other.status == 422, other
        assert "Idempotency-Key" in other.document["error"]
        theirs = await door.infer(document(2), Idempotency_Key="order 1", Weir_Tenant="another")
        assert theirs.headers["location"] != location
        door.intake.answers.set()
        await door.done(location.removeprefix("/v2/jobs/"))
        await door.done(theirs.document["id"])
        again = await door.infer(document(1), Idempotency_Key="order 1")
        assert (again.status, again.headers["location"]) == (202, location)
        assert again.document["status"] == "succeeded"
        assert (await door.infer(document(2), Idempotency_Key="order 1")).status == 422
        assert door.intake.runs == 2
        await door.ask("DELETE", location)
        gone = await door.infer(document(1), Idempotency_Key="order 1")
        assert (gone.status, "deleted" in gone.document["error"]) == (409, True)

    run(nats_url, scenario)


def test_a_job_is_cancelled_or_done_but_not_both(nats_url: str) -> None:
    async def scenario(door: Door) -> None:
        told = await door.client.subscribe("durable.cancel")
        await flush(door.client)
        door.intake.answers.clear()
        id = await door.accepted(document(1))
        while not door.intake.seen:
            await asyncio.sleep(0.01)
        cancelled = await door.ask("POST", f"/v2/jobs/{id}/cancel")
        assert (cancelled.status, cancelled.document["status"]) == (200, "cancelled")
        assert json.loads((await told.next_msg(5)).data) == {"id": id, "model": "m"}
        door.intake.answers.set()
        result = await door.ask("GET", f"/v2/jobs/{id}/result")
        assert (result.status, "cancelled" in result.document["error"]) == (410, True)
        done = await door.accepted(document(1))
        await door.done(done)
        assert (await door.done(id))["status"] == "cancelled"
        late = await door.ask("POST", f"/v2/jobs/{done}/cancel")
        assert late.document["status"] == "succeeded"

    run(nats_url, scenario)


def test_what_is_deleted_is_not_done_again(nats_url: str) -> None:
    async def scenario(door: Door) -> None:
        door.intake.answers.clear()
        id = await door.accepted(document(1))
        while not door.intake.seen:
            await asyncio.sleep(0.01)
        for _ in range(2):
            assert (await door.ask("DELETE", f"/v2/jobs/{id}")).status == 204
            assert (await door.ask("GET", f"/v2/jobs/{id}")).status == 404
        door.intake.answers.set()
        while await door.queued():
            await asyncio.sleep(0.01)
        assert (await door.ask("GET", f"/v2/jobs/{id}")).status == 404
        assert (await door.ask("POST", f"/v2/jobs/{id}/cancel")).status == 404
        failed = await door.accepted(document(1))
        await door.done(failed)
        await door.ask("DELETE", f"/v2/jobs/{failed}")
        assert (await door.ask("GET", f"/v2/jobs/{failed}/result")).status == 404

    run(nats_url, scenario)


def test_a_failure_is_told_as_the_sync_route_tells_it(nats_url: str) -> None:
    async def scenario(door: Door) -> None:
        door.intake.failure = invalid("not like this")
        id = await door.accepted(document(1))
        told = await door.done(id)
        assert (told["status"], told["error"]) == ("failed", "not like this")
        result = await door.ask("GET", f"/v2/jobs/{id}/result")
        assert (result.status, result.document) == (400, {"error": "not like this"})

    run(nats_url, scenario)


def test_a_request_is_running_once_it_was_taken_up(nats_url: str) -> None:
    async def scenario(door: Door) -> None:
        door.intake.answers.clear()
        ids = [await door.accepted(document(1)), await door.accepted(document(2))]
        while (await door.ask("GET", f"/v2/jobs/{ids[0]}")).document["status"] != "running":
            await asyncio.sleep(0.05)
        waiting = await door.ask("GET", f"/v2/jobs/{ids[1]}", Prefer="wait=0")
        assert waiting.document["status"] == "queued"
        assert (waiting.headers["preference-applied"], waiting.headers["retry-after"]) == ("wait=0", "1")
        door.intake.answers.set()
        assert (await door.done(ids[1]))["status"] == "succeeded"

    run(nats_url, scenario)


def test_a_full_queue_refuses_at_once(nats_url: str) -> None:
    async def scenario(door: Door) -> None:
        door.intake.takes.clear()
        await door.accepted(document(1))
        while True:
            answer = await door.infer(document(1))
            if answer.status != 202:
                break
            await asyncio.sleep(0.1)
        assert (answer.status, answer.headers["retry-after"]) == (429, "1")
        assert "queue" in answer.document["error"]

    run(nats_url, scenario, queue_max_messages=3)


def test_jobs_are_restricted_as_inference_is(nats_url: str) -> None:
    async def scenario(door: Door) -> None:
        assert (await door.infer(document(1))).status == 403
        assert (await door.ask("GET", "/v2/jobs/x")).status == 403
        assert (await door.infer(document(1), key="secret")).status == 202
        assert (await door.ask("DELETE", "/v2/jobs/x/y", key="secret")).status == 404

    run(nats_url, scenario, Access(["inference:key=secret"]))


def test_forwarded_headers_are_written_into_the_body(nats_url: str) -> None:
    async def scenario(door: Door) -> None:
        raw = document(1, parameters={"mine": 1})
        id = await door.accepted(raw, X_Team="blue")
        assert (await door.done(id))["status"] == "succeeded"
        reserved = await door.infer(raw, X_Team="blue", Priority="3")
        assert reserved.status == 202  # not forwarded

    run(nats_url, scenario, Access(http_forward_pattern="x-.*"))


def test_ids_that_are_none(nats_url: str) -> None:
    async def scenario(door: Door) -> None:
        for id in ("x", "%2A", "a.b", "%3E", "x" * 600, "%00", "%C3%A9", "batch-1"):
            for method, path in (("GET", ""), ("GET", "/result"), ("POST", "/cancel")):
                answer = await door.ask(method, f"/v2/jobs/{id}{path}")
                assert answer.status == 404, (id, answer)
            assert (await door.ask("DELETE", f"/v2/jobs/{id}")).status == 204

    run(nats_url, scenario)


def test_without_a_broker_nothing_is_accepted_or_told(tmp_path: Path) -> None:
    server = EmbeddedNats(tmp_path)
    server.start()

    async def scenario(door: Door) -> None:
        id = await door.accepted(document(1))
        await door.done(id)
        await asyncio.to_thread(server.stop)
        while door.later.bus.is_connected:
            await asyncio.sleep(0.01)
        answer = await door.infer(document(1))
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "broker" in answer.document["error"]

    run(server.url, scenario)


def test_a_broker_without_room_refuses_with_the_reason_until_it_stores_again(tmp_path: Path) -> None:
    server = EmbeddedNats(tmp_path)
    server.start()

    async def scenario(door: Door) -> None:
        first = await door.accepted(document(1))
        assert server.pid is not None
        with full_disk(server.pid, tmp_path):
            large = document(*([1.5] * FREE_BYTES))
            for body in (large, document(1)):  # the second one is not published
                answer = await door.infer(body)
                assert (answer.status, answer.headers["retry-after"]) == (503, "5")
                assert "the message broker stores nothing now, its disk may be full" in answer.document["error"]
        await asyncio.to_thread(server.process.terminate)  # type: ignore[union-attr]
        await asyncio.to_thread(server.process.wait)  # type: ignore[union-attr]
        await asyncio.to_thread(server.start)
        while (answer := await door.infer(document(1))).status == 503:
            await asyncio.sleep(0.01)
        for id in (first, answer.document["id"]):
            assert (await door.done(id))["status"] == "succeeded"

    run(server.url, scenario)
    server.stop()


def test_who_waits_for_a_job_is_let_go_when_the_gateway_stops(nats_url: str) -> None:
    async def scenario(door: Door) -> None:
        door.intake.takes.clear()
        id = await door.accepted(document(1))
        waiting = asyncio.create_task(door.ask("GET", f"/v2/jobs/{id}", Prefer="wait=60"))
        while not door.later.jobs.waiting:
            await asyncio.sleep(0.01)
        door.later.stop()
        assert (await waiting).document["status"] == "queued"

    run(nats_url, scenario)

"""Durable requests that don't succeed: their records, and their metrics."""

import json
import urllib.request
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest

from tests.support.clients.producers import Answer, Producer, int64_body, producer, value_of
from tests.support.models.ensembles import write_ensemble
from tests.support.models.sequences import write_accumulator
from tests.support.models.zoo import write_faulty, write_identity, write_python_model, write_slow, write_streamer
from tests.support.servers.weir_server import Server
from tests.support.waiting import eventually

STEP = ("fast", {"IN": "IN"}, {"OUT": "OUT"})
NUMBERS = ({"IN": ("INT64", [-1])}, {"OUT": ("INT64", [-1])})

WAYS = (
    ("batch.fast", ""),
    ("batch.fast.v1", ""),
    ("event.fast.v01", ""),
    ("event.ensemble", ""),
    ("batch.ensemble", ""),
    ("event.forward", "fast>"),
    ("batch.forward", "ensemble>"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("outcomes")
    models = folder / "models"
    write_identity(models, "fast", "INT64", more="dynamic_batching { }")
    write_faulty(models)
    write_python_model(models, "fickle", "fickle", {"FAILURES": ("INT64", [1])}, {"ASKED": ("INT64", [1])}, 4)
    write_streamer(models, "stream", "")
    write_accumulator(models, "sum")
    bounds = {"weir_queue_max_messages": 4, "weir_queue_max_age_secs": 1}
    rows = "\n".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}' for k, v in bounds.items())
    write_slow(models, "small", rows)
    write_ensemble(models, "ensemble", *NUMBERS, [STEP], 8)
    write_python_model(models, "forward", "forward", *NUMBERS, 8)
    with Server(
        folder, models, "--durable-attempts=3", "--queue-max-messages=50", "--tenant-limit=limited=2"
    ) as started:
        yield started


def body_of(*inputs: tuple[str, str, Any], **more: Any) -> bytes:
    tensors = [{"name": name, "datatype": type, "shape": [1, 1], "data": [value]} for name, type, value in inputs]
    return json.dumps({**more, "inputs": tensors}).encode()


def slow_body(delay_ms: float) -> bytes:
    return body_of(("VALUE", "INT64", 1), ("DELAY_MS", "FP32", delay_ms))


def http(server: Server, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=40)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null")
    finally:
        connection.close()


def by_id(came: list[Answer]) -> dict[str, str]:
    return {headers["Weir-Id"]: headers["Weir-Outcome"] for headers, _ in came}


async def test_failures_that_pass_are_tried_again(server: Server) -> None:
    async with producer(server.nats_url) as to:
        headers, body = await to.ask("event.fickle", body_of(("FAILURES", "INT64", 2), id="f2"))
        assert (headers["Weir-Outcome"], headers["Weir-Attempts"], value_of(body)) == ("succeeded", "3", 3)
        assert [reason for _, reason in json.loads(headers["Weir-History"])] == ["not now, 1", "not now, 2"]
        headers, body = await to.ask("event.fickle", body_of(("FAILURES", "INT64", 9), id="f9"))
        assert (headers["Weir-Outcome"], headers["Weir-Attempts"]) == ("dead-lettered", "3")
        assert b"gave up after 3 attempts: not now, 3" in body
        letter = await to.jetstream.get_last_msg("DEAD", "dead.fickle")
        assert (letter.headers or {})["Weir-Attempts"] == "3"


async def test_poison_is_put_away_and_others_flow(server: Server) -> None:
    async with producer(server.nats_url) as to:
        inbox, came = await to.answers()
        for id in ("kill", *(f"w{number}" for number in range(10))):
            await to.send("event.faulty", body_of(("WHAT", "BYTES", id)), Nats_Msg_Id=id, Weir_Reply_To=inbox)
        await eventually(lambda: len(came) == 11, 30)
        outcomes = by_id(came)
        assert outcomes.pop("kill") == "dead-lettered"
        assert set(outcomes.values()) == {"succeeded"}
        letter = (await to.jetstream.get_last_msg("DEAD", "dead.faulty")).headers or {}
        assert (letter["Weir-Dead-Id"], letter["Weir-Attempts"]) == ("kill", "4")


async def test_limits_of_tenants_and_models_and_ages(server: Server) -> None:
    async with producer(server.nats_url) as to:
        inbox, came = await to.answers()
        for number in range(6):
            asked = {"Nats_Msg_Id": f"t{number}", "Weir_Reply_To": inbox}
            tenant = "limited" if number < 3 else "free"
            subject = "event.small.job.t4" if number == 4 else "event.small"
            await to.send(subject, slow_body(1100), **asked, Weir_Tenant=tenant)
        # The third one of the tenant is refused, then the fifth in all; what may be found over HTTP was checked before.
        await eventually(lambda: len(came) == 2)
        assert {h["Weir-Id"]: h["Weir-Status"] for h, _ in came} == {"t2": "429", "t5": "429"}
        status, _ = http(server, "POST", "/v2/models/small/infer", slow_body(1), Prefer="respond-async")
        assert status == 429
        assert http(server, "POST", "/v2/jobs/t4/cancel")[0] == 404  # it was not accepted over HTTP
        await to.cancel("small", "t4")
        await eventually(lambda: len(came) == 6)
        assert by_id(came) == {"t0": "succeeded", "t1": "expired", "t2": "failed", "t3": "expired",
                               "t4": "cancelled", "t5": "failed"}  # fmt: skip


async def test_responses_before_an_error_are_sent(server: Server) -> None:
    async with producer(server.nats_url) as to:
        inbox, came = await to.answers()
        plan = body_of(("PLAN", "BYTES", '{"responses": 4, "error_at": 2}'))
        await to.send("event.stream", plan, Nats_Msg_Id="d1", Weir_Reply_To=inbox)
        await eventually(lambda: came and came[-1][0]["Weir-Final"] == "true")
        assert [headers.get("Weir-Response") for headers, _ in came] == ["0", "1", None]
        assert (came[-1][0]["Weir-Outcome"], came[-1][0]["Weir-Responses"]) == ("failed", "2")
        for number in ("0", "1"):
            stored = await to.jetstream.get_last_msg("RESULT", f"result.stream.d1.{number}")
            assert stored.data == came[int(number)][1]


async def test_every_kind_of_model_has_both_lanes(server: Server) -> None:
    async with producer(server.nats_url) as to:
        for subject, way in WAYS:
            headers, answer = await to.ask(subject, int64_body(5, parameters={"way": way} if way else {}))
            assert (subject, headers["Weir-Outcome"]) == (subject, "succeeded")
            assert value_of(answer) == 5


async def test_a_version_that_there_is_not_holds_up_nobody(server: Server) -> None:
    async with producer(server.nats_url) as to:
        await to.send("event.fast.v7", int64_body(1))
        assert (await to.ask("event.fast", int64_body(1)))[0]["Weir-Outcome"] == "succeeded"
        assert (await to.ask("event.fast.x", int64_body(1)))[0]["Weir-Outcome"] == "dead-lettered"
        # The name of the model in other letters: it is found all the same.
        assert (await to.ask("event.f=61st", int64_body(1), Nats_Msg_Id="stray"))[0]["Weir-Id"] == "stray"
        strange = {"Nats_Subject": "foo", "Nats_Sequence": "bar", "Nats_Msg_Id": "strange"}
        assert (await to.ask("event.fast.job.strange", int64_body(1), **strange))[0]["Weir-Outcome"] == "succeeded"
        with pytest.raises(Exception, match="no response from stream"):
            await to.jetstream.publish("event.fast.v1.v2", int64_body(1))


def test_counters_add_up(server: Server) -> None:
    """Each request that was taken has ended once."""
    with urllib.request.urlopen(f"http://{server.metrics_place}/metrics") as page:
        rows = [line for line in page.read().decode().splitlines() if line.startswith("weir_durable_")]
    for model, count in (("fickle", 2), ("faulty", 11), ("small", 6), ("stream", 1), ("ensemble", 2), ("forward", 2)):
        counts: Counter[str] = Counter()
        for row in rows:
            if f'model="{model}"' in row:
                counts[row.partition("{")[0].removeprefix("weir_durable_")] += int(float(row.rpartition(" ")[2]))
        assert (model, counts["accepted"], counts["ended"], counts["conflicts"]) == (model, count, count, 0)


async def sum_of(to: Producer, sequence: str, number: int, inbox: str, **flags: str) -> None:
    id = f"{sequence}-{number}"
    asked = {"Nats_Msg_Id": id, "Weir_Sequence_Id": sequence, "Weir_Reply_To": inbox, **flags}
    await to.send("event.sum", body_of(("IN", "FP32", number)), **asked)


@pytest.mark.timeout(60)
async def test_sequences_keep_their_order_and_are_never_begun_anew(server: Server) -> None:
    async with producer(server.nats_url) as to:
        inbox, came = await to.answers()
        sequences, count = ("a", "7", "c"), 60
        for number in range(count):
            for sequence in sequences:
                await sum_of(to, sequence, number, inbox, **({"Weir_Sequence_Start": "1"} if not number else {}))
            if number == count // 2:
                server.kill("durable")
        await eventually(lambda: len({h["Weir-Id"] for h, _ in came}) > 3 * count - 40, 30)
        for sequence in sequences:
            is_lost = False
            for number in range(count):
                headers, body = await to.record("sum", f"{sequence}-{number}")
                if headers["Weir-Outcome"] == "succeeded":
                    assert not is_lost
                    assert value_of(body) == sum(range(number + 1))
                else:
                    is_lost = True
                    assert b"start the sequence again" in body, body
        server.wait_ready()
        # One that is started again is whole.
        for number in (3, 4):
            flag = {"Weir_Sequence_Start": "1"} if number == 3 else {"Weir_Sequence_End": "true"}
            inputs = body_of(("IN", "FP32", number))
            headers, body = await to.ask("event.sum", inputs, Weir_Sequence_Id="a", **flag)
            assert headers["Weir-Outcome"] == "succeeded"
        assert value_of(body) == 7

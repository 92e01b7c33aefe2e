"""`weir dead` against a real nats-server, on dead letters stored as the intake stores them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError
from typer.testing import CliRunner, Result

from tests.support.servers.weir_server import clean_environment
from weir.bus.naming import durable_subjects as subjects
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.streams.acked_publisher import AckedPublisher
from weir.bus.streams.dead_letters import DeadLetters
from weir.bus.streams.declarations import QueueLimits, ensure_durable_streams
from weir.commands.app import app
from weir.schemas.wire.terminal import Attempt, Outcome, TerminalRecord

LIMITS = QueueLimits(max_messages=5, max_bytes=1 << 24, result_ttl_s=3600.0, result_max_bytes=1 << 24)
LONG_AGO_MS = 60_000

T = TypeVar("T")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path_factory.mktemp("nats"))
    server.start()
    with_bus(server.url, lambda bus: ensure_durable_streams(bus, LIMITS))
    yield server
    server.stop()


class Broker:
    """What a test stores and sees, and the command line."""

    def __init__(self, url: str) -> None:
        self.url = url

    def run(self, *words: str, typed: str | None = None) -> Result:
        return CliRunner().invoke(app, ["dead", *words, "--nats", self.url], input=typed)

    def output(self, *words: str) -> str:
        result = self.run(*words)
        assert result.exit_code == 0, (result.output, result.exception)
        return result.output

    def jetstream(self, act: Callable[[JetStreamContext], Awaitable[T]]) -> T:
        async def connected() -> T:
            client = await nats.connect(self.url)
            try:
                return await act(client.jetstream())
            finally:
                await client.close()

        return asyncio.run(connected())

    def die(
        self,
        model: str,
        id: str,
        body: bytes = b"{}",
        subject: str = "",
        age_ms: int = LONG_AGO_MS,
        outcome: Outcome | None = Outcome.DEAD_LETTERED,
        **headers: str,
    ) -> int:
        """Stores a dead letter and the record of its id; returns its sequence."""
        now_ms = int(time.time() * 1000)
        letter = {
            "Content-Type": "application/json",
            "Nats-Msg-Id": f"dead-{id}-{time.time_ns()}",
            "Weir-Dead-Reason": "no such input",
            "Weir-Dead-Subject": subject or subjects.event(model),
            "Weir-Dead-Id": id,
            "Weir-Dead-Ms": str(now_ms - age_ms),
            "Weir-Attempts": "2",
            "Weir-History": json.dumps([[now_ms, "its process died"]]),
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }

        async def store(jetstream: JetStreamContext) -> int:
            ack = await jetstream.publish(subjects.dead(model), body, headers=letter)
            if outcome is not None:
                record = TerminalRecord(id, model, outcome, history=[Attempt(now_ms, "its process died")])
                wanted = {**dict(record.headers()), "Nats-Expected-Last-Subject-Sequence": "0"}
                await jetstream.publish(subjects.result(model, id), b"record", headers=wanted)
            return ack.seq

        return self.jetstream(store)

    def last(self, stream: str, subject: str) -> Any:
        async def look(jetstream: JetStreamContext) -> Any:
            try:
                return await jetstream.get_last_msg(stream, subject)
            except NotFoundError:
                return None

        return self.jetstream(look)

    def count(self, stream: str) -> int:
        async def look(jetstream: JetStreamContext) -> int:
            return int((await jetstream.stream_info(stream)).state.messages)

        return self.jetstream(look)

    def empty(self) -> None:
        async def purge(jetstream: JetStreamContext) -> None:
            for stream in (subjects.QUEUE_STREAM, subjects.RESULT_STREAM, subjects.DEAD_STREAM):
                await jetstream.purge_stream(stream)

        self.jetstream(purge)


def with_bus(url: str, act: Callable[[Bus], Awaitable[T]]) -> T:
    async def connected() -> T:
        async with asyncio.TaskGroup() as background:
            bus = await Bus.connect(url, "test", background)
            try:
                return await act(bus)
            finally:
                await bus.close()

    return asyncio.run(connected())


@pytest.fixture
def broker(server: EmbeddedNats) -> Iterator[Broker]:
    broker = Broker(server.url)
    yield broker
    broker.empty()


def test_list_tells_the_newest_first(broker: Broker) -> None:
    assert broker.output("list") == "no dead letters\n"
    broker.die("a.b", "one", b"12345")
    for number in range(8):
        broker.die("other", f"o{number}")
    last = broker.die("a.b", "two\x1b[31m", Weir_Object="body-of-two")
    rows = broker.output("list").splitlines()
    assert len(rows) == 11
    assert rows[1].split()[:1] == [str(last)]
    assert "two?[31m" in rows[1]
    assert rows[1].split()[-5:] == ["in", "store", "no", "such", "input"]
    only = [json.loads(line) for line in broker.output("list", "--json", "--model", "a.b", "--limit", "2").splitlines()]
    assert [row["id"] for row in only] == ["two\x1b[31m", "one"]
    assert only[1]["size_bytes"] == 5
    assert only[1]["attempts"] == 2
    assert only[1]["history"][0][1] == "its process died"
    assert only[1]["subject"] == "event.a=2Eb"
    assert only[0]["object"] == "body-of-two"
    assert [json.loads(line)["id"] for line in broker.output("list", "--json", "--limit", "1").splitlines()] == [
        "two\x1b[31m"
    ]


def test_show_prints_json_text_and_bytes(broker: Broker) -> None:
    broker.die("m", "json", b'{"inputs":[]}', X_Mine="yes", Authorization="Bearer hush")
    shown = broker.output("show", "json")
    assert "  Authorization: ***" in shown
    assert "hush" not in shown
    assert '{\n  "inputs": []\n}' in shown
    assert "  X-Mine: yes" in shown
    assert "its process died" in shown
    broker.die("m", "text", "grüße".encode())
    assert broker.output("show", "text").endswith("body (7 bytes):\ngrüße\n")
    sequence = broker.die("m", "bytes", bytes(range(250)) * 5)
    shown = broker.output("show", str(sequence))
    assert "00000010  10 11 12" in shown
    assert "... and 226 more bytes" in shown
    for sequence_of_none in ("0", "18446744073709551615", "18446744073709551616", "9" * 40):
        missing = broker.run("show", sequence_of_none)
        assert str(missing.exception) == f"there is no dead letter of sequence {sequence_of_none}"
    missing = broker.run("show", "nobody")
    assert str(missing.exception) == "there is no dead letter of id or sequence 'nobody'"


def test_an_id_goes_before_a_sequence(broker: Broker) -> None:
    sequence = broker.die("m", "first")
    broker.die("m", str(sequence))
    assert f"id:           {sequence}\n" in broker.output("show", str(sequence))
    broker.die("m", str(sequence), outcome=None)
    ambiguous = broker.run("replay", str(sequence))
    assert "name one by its sequence" in str(ambiguous.exception)


def test_a_replay_goes_where_it_was_published_under_its_id(broker: Broker) -> None:
    subject = subjects.event("m", "3")
    broker.die("m", "r1", b"body", subject, Weir_Reply_To="answers", Weir_Deadline_Ms="5", Weir_Tenant="t")
    assert "m r1 (seq " in (said := broker.output("replay", "r1"))
    assert said.endswith("replayed 1 of 1\n")
    message = broker.last(subjects.QUEUE_STREAM, subject)
    assert message.data == b"body"
    assert message.headers.pop("Nats-Msg-Id").startswith("replay-")
    assert message.headers == {
        "Content-Type": "application/json",
        "Weir-Reply-To": "answers",
        "Weir-Tenant": "t",
        "Weir-Id": "r1",
    }
    assert broker.last(subjects.RESULT_STREAM, subjects.result("m", "r1")) is None
    assert broker.count(subjects.DEAD_STREAM) == 0
    # The next run's record is the first of its id again.
    broker.die("m", "r1")


def test_several_are_replayed_oldest_first(broker: Broker) -> None:
    for number in range(3):
        broker.die("m", f"s{number}")
    broker.die("n", "other")
    assert broker.output("replay", "--model", "m").endswith("replayed 3 of 3\n")
    assert broker.count(subjects.QUEUE_STREAM) == 3
    assert broker.last(subjects.QUEUE_STREAM, "event.m").headers["Weir-Id"] == "s2"
    assert broker.output("replay", "--all").endswith("replayed 1 of 1\n")
    assert broker.run("replay").exit_code != 0
    assert broker.run("replay", "x", "--all").exit_code != 0


def test_what_has_ended_otherwise_is_replayed_under_a_new_id_only(broker: Broker) -> None:
    sequence = broker.die("m", "conflict", outcome=Outcome.SUCCEEDED)
    refused = broker.run("replay", "conflict")
    assert refused.exit_code == 1
    assert "not replayed: its id has ended as succeeded" in refused.output
    assert broker.count(subjects.QUEUE_STREAM) == 0
    assert f"replayed as conflict.r{sequence}" in broker.output("replay", "--new-id", "conflict")
    assert broker.last(subjects.QUEUE_STREAM, "event.m").headers["Weir-Id"] == f"conflict.r{sequence}"
    assert broker.last(subjects.RESULT_STREAM, subjects.result("m", "conflict")).data == b"record"


def test_one_whose_record_may_still_come_is_not_replayed(broker: Broker) -> None:
    broker.die("m", "young", outcome=None, age_ms=0)
    assert "its record is not stored yet" in broker.run("replay", "young").output
    assert broker.count(subjects.DEAD_STREAM) == 1
    broker.die("m", "old", outcome=None)
    assert broker.output("replay", "old").endswith("replayed 1 of 1\n")


def test_a_full_queue_keeps_the_letter_and_its_record(broker: Broker) -> None:
    for number in range(LIMITS.max_messages):
        broker.jetstream(lambda js, n=number: js.publish("event.m", b"%d" % n))  # type: ignore[misc]
    broker.die("m", "f1")
    refused = broker.run("replay", "f1")
    assert "stream QUEUE rejected the message: maximum messages per subject exceeded" in refused.output
    assert broker.count(subjects.DEAD_STREAM) == 1
    record = broker.last(subjects.RESULT_STREAM, subjects.result("m", "f1"))
    assert (record.data, record.headers["Weir-Outcome"]) == (b"record", "dead-lettered")


@pytest.mark.parametrize("died_after", ["record", "publish"])
def test_a_replay_that_was_killed_is_done_again(broker: Broker, died_after: str) -> None:
    broker.die("m", "k1", b"mine")

    async def killed(bus: Bus) -> None:
        async with asyncio.TaskGroup() as background:
            publisher = AckedPublisher(bus, "killed")
            await publisher.start(background)
            dead = DeadLetters(bus, publisher)
            letter = await dead.get((await dead.find("k1"))[0].sequence)

            async def die(*_: Any) -> Any:
                raise ConnectionError("killed")

            if died_after == "record":
                publisher.store = die  # type: ignore[method-assign]
            else:
                delete = dead._delete

                async def delete_records(stream: str, sequence: int) -> None:
                    await (die() if stream == subjects.DEAD_STREAM else delete(stream, sequence))

                dead._delete = delete_records  # type: ignore[method-assign]
            with pytest.raises(ConnectionError):
                await dead.replay(letter)
            publisher.stop()

    with_bus(broker.url, killed)
    assert broker.count(subjects.DEAD_STREAM) == 1
    assert broker.last(subjects.RESULT_STREAM, subjects.result("m", "k1")) is None
    assert broker.output("replay", "k1").endswith("replayed 1 of 1\n")
    # The second publish of the same letter is known as such.
    assert broker.count(subjects.QUEUE_STREAM) == 1
    assert broker.count(subjects.DEAD_STREAM) == 0


def test_a_letter_that_names_no_queue_is_not_published(broker: Broker) -> None:
    for subject in ("infer.m", "event", "event.*", "event..m", "$JS.API.STREAM.DELETE.QUEUE"):
        broker.die("m", f"bad-{subject}", subject=subject, outcome=None)
    broker.die("m", "cut", Weir_Dead_Truncated="8388000", outcome=None)
    refused = broker.run("replay", "--all").output
    assert refused.count("its headers do not name its id") == 5
    assert "too large to be kept with its body" in refused
    assert broker.count(subjects.DEAD_STREAM) == 6


def test_purge_takes_bodies_with_it_and_asks_before(broker: Broker) -> None:
    async def put(jetstream: JetStreamContext) -> None:
        store = await jetstream.object_store(subjects.REQUEST_OBJECTS)
        for name in ("large", "kept"):
            await store.put(name, b"x" * 300_000)

    async def has(jetstream: JetStreamContext, name: str) -> bool:
        store = await jetstream.object_store(subjects.REQUEST_OBJECTS)
        try:
            await store.get_info(name)
        except NotFoundError:
            return False
        return True

    broker.jetstream(put)
    broker.die("m", "p1", b"", Weir_Object="large")
    broker.die("m", "p2", b"", Weir_Object="kept", age_ms=0, outcome=None)
    broker.die("n", "p3", age_ms=7_200_000)
    asked = broker.run("purge", "--model", "m", typed="n\n")
    assert "Delete 2 dead letters?" in asked.output
    assert asked.exit_code != 0
    assert broker.count(subjects.DEAD_STREAM) == 3
    assert broker.output("purge", "--older-than", "1h", "--yes") == "purged 1\n"
    assert broker.output("purge", "p1", "--yes") == "purged 1\n"
    assert not broker.jetstream(lambda js: has(js, "large"))
    assert broker.jetstream(lambda js: has(js, "kept"))
    assert "is no longer in object store" not in broker.run("replay", "p2").output
    assert broker.run("purge", "--all", typed="y\n").output.endswith("purged 1\n")
    assert not broker.jetstream(lambda js: has(js, "kept"))
    assert broker.count(subjects.DEAD_STREAM) == 0
    assert broker.run("purge", "--older-than", "soon", "--yes").exit_code != 0
    broker.die("m", "p4", b"", Weir_Object="large")
    assert "is no longer in object store requests" in broker.run("replay", "p4").output


def test_it_is_a_command(broker: Broker, tmp_path: Path) -> None:
    broker.die("m", "c1")
    words = [sys.executable, "-P", "-m", "weir", "dead"]
    environment = {**clean_environment(tmp_path), "WEIR_NATS_URL": broker.url}
    reply = subprocess.run([*words, "list"], env=environment, capture_output=True, text=True, check=True)
    assert " c1 " in reply.stdout
    wrong = subprocess.run([*words, "show", "c2"], env=environment, capture_output=True, text=True)
    assert (wrong.returncode, wrong.stderr) == (1, "error: there is no dead letter of id or sequence 'c2'\n")


def test_a_server_without_the_streams_has_none(tmp_path: Path) -> None:
    server = EmbeddedNats(tmp_path / "bare")
    server.start()
    try:
        broker = Broker(server.url)
        assert broker.output("list") == "no dead letters\n"
        assert broker.run("show", "1").exit_code != 0
    finally:
        server.stop()

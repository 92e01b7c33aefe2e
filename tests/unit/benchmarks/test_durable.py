"""The checkers of durable requests and jobs detect every kind of error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.batch_job import JobRun, compare
from benchmarks.durable.images import digest_of, write_images
from tests.support.durable.checker import Verdict, check
from tests.support.durable.ledger import LARGEST_BYTES, SMALLEST_BYTES, Ledger, answer_to, id_of, number_of, payload_of
from weir.bus.naming.durable_subjects import dead, result
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.nats.headers import pack_headers
from weir.bus.streams.acked_publisher import AckedPublisher
from weir.bus.streams.declarations import QueueLimits, ensure_durable_streams
from weir.schemas.wire.terminal import Outcome, TerminalRecord

LIMITS = QueueLimits(max_messages=1000, max_bytes=1 << 20, result_ttl_s=600, result_max_bytes=1 << 20)
SEED = 7


@pytest.fixture(scope="module")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


def test_payloads_are_of_all_sizes_and_their_own() -> None:
    payloads = [payload_of(SEED, number) for number in range(2000)]
    assert len(set(payloads)) == len(payloads)
    sizes = [len(payload) for payload in payloads]
    assert SMALLEST_BYTES <= min(sizes) < 100
    assert LARGEST_BYTES >= max(sizes) > 4000
    assert [number_of(id_of(number)) for number in (0, 7, 10**6)] == [0, 7, 10**6]
    assert number_of("other") == -1


def test_the_checker_tells_each_fault(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.promise([(number, answer_to(payload_of(SEED, number))) for number in range(6)])

    async def plant() -> None:
        async with asyncio.TaskGroup() as background:
            bus = await Bus.connect(nats_server.url, "planter", background)
            await ensure_durable_streams(bus, LIMITS)
            publisher = AckedPublisher(bus, "planter")
            await publisher.start(background)

            async def record(number: int, answer: str, outcome: Outcome = Outcome.SUCCEEDED, attempts: int = 1) -> None:
                told = TerminalRecord(id_of(number), "digest", outcome, attempts=attempts, accepted_ms=5, ended_ms=9)
                body = json.dumps({"outputs": [{"name": "SHA256", "data": [answer]}]}).encode()
                await publisher.store(result("digest", id_of(number)), body, pack_headers(told.headers()))

            right = [answer_to(payload_of(SEED, number)) for number in range(6)]
            await record(0, right[0])
            await record(1, right[2])  # another's
            await record(2, right[2])
            await record(2, right[2])  # in the place of the first
            await record(4, right[4], Outcome.DEAD_LETTERED, attempts=5)
            await record(99, right[0])  # nobody asked for it
            await record(5, right[5])
            await publisher.store(dead("digest"), b"", pack_headers({"Weir-Dead-Id": id_of(4)}))
            await publisher.store(dead("digest"), b"", pack_headers({"Weir-Dead-Id": id_of(3)}))
            await publisher.store("event.digest", b"left")
            publisher.stop()
            await bus.close()

    asyncio.run(plant())
    found = asyncio.run(check(nats_server.url, [tmp_path / "ledger"]))
    assert found == Verdict(
        promised=6,
        lost=1,
        answered_twice=1,
        wrong=1,
        unknown=1,
        begun_again=1,
        dead_without_record=1,
        left_in_queue=1,
        outcomes=found.outcomes,
        errors=found.errors,
        waits_ms=[4] * 5,
    )
    assert found.outcomes == {"succeeded": 4, "dead-lettered": 1}
    assert found.errors.total() == 1
    assert not found.is_clean


def rows_of(images: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for number, file in enumerate(sorted(images.glob("*/*.png"))):
        sha256, mean = digest_of(file.read_bytes())
        outputs = {"SHA256": [sha256], "MEAN": [mean]}
        rows.append({"item": number, "source": f"{file.parent.name}/{file.name}", "outputs": outputs})
    return rows


def compared(images: Path, output: Path, rows: list[dict[str, object]]) -> JobRun:
    output.mkdir()
    half = len(rows) // 2
    for name, part in (("part-0-1.jsonl", rows[:half]), ("part-1-2.jsonl", rows[half:])):
        (output / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    run = JobRun(len(rows))
    compare(run, images, output)
    return run


def test_the_output_of_a_job_is_compared_item_by_item(tmp_path: Path) -> None:
    write_images(tmp_path / "images", 20, SEED)
    rows = rows_of(tmp_path / "images")
    assert len({str(row["outputs"]) for row in rows}) == 20
    assert compared(tmp_path / "images", tmp_path / "right", rows).is_clean
    missing = compared(tmp_path / "images", tmp_path / "missing", rows[:-1])
    assert (missing.missing, missing.is_clean) == (1, False)
    twice = compared(tmp_path / "images", tmp_path / "twice", [*rows, rows[-1]])
    assert (twice.twice, twice.out_of_order) == (1, 1)
    swapped = compared(tmp_path / "images", tmp_path / "swapped", [rows[1], rows[0], *rows[2:]])
    assert (swapped.out_of_order, swapped.wrong) == (3, 0)
    wrong = compared(tmp_path / "images", tmp_path / "wrong", [{**rows[0], "outputs": rows[1]["outputs"]}, *rows[1:]])
    assert wrong.wrong == 1
    failed = compared(tmp_path / "images", tmp_path / "failed", [{"item": 0, "source": "", "error": "no"}, *rows[1:]])
    assert (failed.errors, failed.missing) == (1, 0)

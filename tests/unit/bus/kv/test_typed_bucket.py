"""Two writers of one bucket: no change is lost, and all views see what the bucket has stored, in its order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nats.js.errors import NotFoundError

from tests.support.waiting import eventually
from weir.bus.kv.typed_bucket import TypedBucket
from weir.bus.kv.view import KvBucket
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.streams.declarations import Bucket

Counts = dict[str, int]
"""A record: how often each writer has changed it."""

_numbers = count(1)


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@asynccontextmanager
async def views(nats: EmbeddedNats, number: int, bucket: Bucket) -> AsyncIterator[list[TypedBucket[Counts]]]:
    """Views of a bucket, each with a connection of its own."""
    async with asyncio.TaskGroup() as background:
        buses = [await Bus.connect(nats.url, "test", background) for _ in range(number)]
        made = [
            TypedBucket[Counts](bus, bucket, lambda counts: json.dumps(counts).encode(), json.loads) for bus in buses
        ]
        for view in made:
            await view.start()
        yield made
        for bus in buses:
            await bus.close()


def raised(counts: Counts | None, writer: str) -> Counts:
    return {**(counts or {}), writer: (counts or {}).get(writer, 0) + 1}


@given(
    writes=st.lists(st.tuples(st.integers(0, 1), st.sampled_from("ab"), st.booleans()), min_size=2, max_size=24),
    burst=st.integers(2, 8),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_change_is_lost_and_all_views_agree(
    nats: EmbeddedNats, writes: list[tuple[int, str, bool]], burst: int
) -> None:
    """Two writers raise counters in, or remove, the same two records, some at once; a third process looks on."""

    async def run() -> None:
        bucket = Bucket(f"property-{next(_numbers)}")
        async with views(nats, 3, bucket) as (first, second, onlooker):
            seen: dict[str, list[Counts | None]] = {"a": [], "b": []}
            stored: dict[str, list[Counts | None]] = {"a": [], "b": []}
            onlooker.on_change(lambda name: seen[name].append(onlooker.get(name)))
            expected: dict[str, int] = {"a": 0, "b": 0}

            async def write(writer: int, name: str, removes: bool) -> None:
                view = (first, second)[writer]

                def change(counts: Counts | None) -> Counts | None:
                    nonlocal before
                    before = counts
                    return None if removes else raised(counts, f"w{writer}")

                before: Counts | None = None
                after = await view.update(name, change)
                if removes:
                    expected[name] -= sum((before or {}).values())
                else:
                    expected[name] += 1
                if after != before:
                    stored[name].append(after)

            for start in range(0, len(writes), burst):
                await asyncio.gather(*(write(*one) for one in writes[start : start + burst]))
            last = {
                key: json.loads(data)
                for key, data in (await KvBucket(first._bus, bucket.name).values()).items()
                if data
            }
            assert {name: sum(last.get(name, {}).values()) for name in "ab"} == expected
            await eventually(lambda: all(view._records == last for view in (first, second, onlooker)))
            # Each state that was stored was seen, and none that was rejected.
            for name in "ab":
                assert sorted(map(str, seen[name])) == sorted(map(str, stored[name]))

    asyncio.run(run())


async def test_a_change_that_is_rejected_is_never_seen(nats: EmbeddedNats) -> None:
    async with views(nats, 2, Bucket("rejected")) as (writer, onlooker):
        seen: list[Counts | None] = []
        onlooker.on_change(lambda name: seen.append(onlooker.get(name)))
        bucket = KvBucket(writer._bus, "rejected")
        sequence = await bucket.swap("a", b'{"w":1}', 0)
        assert sequence == 1
        assert await bucket.swap("a", b'{"late":1}', 0) == 0
        assert await bucket.swap("a", b'{"w":2}', sequence) == 2
        await eventually(lambda: seen == [{"w": 1}, {"w": 2}])
        with pytest.raises(ZeroDivisionError):
            await writer.update("a", lambda _counts: {"never": 1 // 0})
        assert await writer.update("a", lambda counts: counts) == {"w": 2}
        assert await bucket.entry("a") == (b'{"w":2}', 2)


async def test_records_of_other_names_and_without_a_bucket(
    nats: EmbeddedNats, caplog: pytest.LogCaptureFixture
) -> None:
    async with views(nats, 1, Bucket("named")) as (view,):
        named = TypedBucket[str](view._bus, Bucket("named"), str.encode, bytes.decode, lambda record: record)
        await named.start()
        assert await named.update("a.b", lambda _known: "a.b") == named.get("a.b") == "a.b"
        await KvBucket(view._bus, "named").put("c", b"d")
        await eventually(lambda: "bucket named: dropped the record of key 'c': it names 'd'" in caplog.text)
        assert (named.all(), named.names(), named.malformed) == (["a.b"], {"a.b"}, 1)
        await view._bus.jetstream.delete_stream("KV_named")
        with pytest.raises(NotFoundError):
            await named.update("a.b", lambda _known: None)

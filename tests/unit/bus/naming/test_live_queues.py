"""The streams of the queues of live requests, and the process that decides on their number."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from weir.bus.naming.live_queues import LiveLayout, LiveQueue
from weir.bus.nats.connection import Bus
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.streams.declarations import LIVE_MAX_BYTES, ensure_streams


def learnt(streams: int) -> LiveLayout:
    layout = LiveLayout()
    layout.learn({"weir-live-streams": str(streams)})
    return layout


def test_one_stream_has_the_plain_names() -> None:
    layout = LiveLayout()
    queues = [LiveQueue("m"), LiveQueue("m", 3), LiveQueue("a.b")]
    assert [layout.stream(queue) for queue in queues] == ["LIVE"] * 3
    assert [layout.subject(queue) for queue in queues] == ["live.m", "live.m=p3", "live.a=2Eb"]
    assert layout.subject_of("m") == layout.subject(LiveQueue("m"))


def test_several_streams_share_the_queues() -> None:
    layout = learnt(8)
    queues = [LiveQueue(f"model {number}", partition) for number in range(200) for partition in (0, 1)]
    spread: dict[str, int] = {}
    for queue in queues:
        stream, subject = layout.stream(queue), layout.subject(queue)
        spread[stream] = spread.get(stream, 0) + 1
        assert subject == LiveLayout().subject(queue) + ("" if stream == "LIVE" else f".s{stream[5:]}")
    assert len(spread) == 8
    assert min(spread.values()) > 25
    assert layout.stream(queues[0]) != layout.stream(queues[1]), "partitions of a model lie apart"
    assert layout.stream(LiveQueue("m")) == "LIVE_1", "a promise: all releases must agree"


@pytest.mark.parametrize("recorded", [None, {}, {"weir-live-streams": "no"}, {"weir-live-streams": "65"}])
def test_a_stream_without_a_record_is_the_only_one(recorded: dict[str, str] | None) -> None:
    layout = LiveLayout(4)
    layout.learn(recorded)
    assert layout.streams == 1


async def test_the_first_process_decides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = EmbeddedNats(tmp_path / "nats")
    server.start()
    try:
        async with asyncio.TaskGroup() as background:
            buses = [await Bus.connect(server.url, f"role-{wanted}", background) for wanted in range(5)]
            for wanted, bus in enumerate(buses[1:], 1):
                bus.live_layout.wanted = wanted
            with caplog.at_level(logging.WARNING):
                await asyncio.gather(*map(ensure_streams, buses))
            (streams,) = {bus.live_layout.streams for bus in buses}
            told_otherwise = [bus for bus in buses if bus.live_layout.wanted not in (None, streams)]
            warnings = [r for r in caplog.records if "their creator's number applies" in r.message]
            assert len(warnings) == len(told_otherwise) >= 3
            infos = {str(info.config.name): info.config for info in await buses[0].jetstream.streams_info()}
            live = {name: config for name, config in infos.items() if name.startswith("LIVE")}
            assert len(live) == streams
            assert {config.max_bytes for config in live.values()} == {LIVE_MAX_BYTES // streams}
            # The broker comes back without them: whoever is there makes as many as there were, whatever he was told.
            for name in live:
                await buses[0].jetstream.delete_stream(name)
            await ensure_streams(buses[4])
            assert buses[4].live_layout.streams == streams
            for bus in buses:
                await bus.close()
    finally:
        server.stop()

"""CPU per frame of nats-server with the queues of many models in one stream, and in several.

`python -m benchmarks.live_streams [--models 256] [--partitions 1] [--frames 12000] [STREAMS ...]` prints one line per
layout: CPU of nats-server per frame (published, delivered through a standing pull, acknowledged) and the time to
delivery, with 64 frames in flight spread over all models. Streams, consumers and pulls are those of the roles, driven
without them: 256 models would need too much memory.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from itertools import cycle
from pathlib import Path

import uvloop

from weir.bus.naming.live_queues import LiveLayout, LiveQueue
from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.embedded_server import EmbeddedNats
from weir.bus.streams.declarations import acquire_live_consumer, ensure_streams
from weir.bus.streams.pull import StandingPull

UNDER_WAY = 64
BODY = bytes(100)


def cpu_s(pid: int) -> float:
    """CPU that the process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Traffic:
    """Frames for all queues in turn: each that is acknowledged makes room for another."""

    def __init__(self, bus: Bus, queues: list[LiveQueue]) -> None:
        self._bus = bus
        self._queues = cycle(queues)
        self._sent_s: dict[str, list[float]] = {queue.consumer: [] for queue in queues}
        self._left = 0
        self._open = 0
        self._done = asyncio.Event()
        self.waits_s: list[float] = []

    async def pull(self, queue: LiveQueue) -> None:
        """Takes what comes in the queue, as a scheduler does."""
        consumer = (await acquire_live_consumer(self._bus, queue)).consumer
        inbox = queue.inbox("bench")
        stream = self._bus.live_layout.stream(queue)
        pull = StandingPull(self._bus, stream, consumer, lambda message: self._came(queue, pull, message.reply))
        await self._bus.subscribe(inbox, pull.receive)
        pull.start(inbox)

    def stored(self, message: Message) -> None:
        """JetStream has acknowledged a frame."""
        if b'"error"' in message.data or message.status:
            raise SystemExit(f"a frame was refused: {message.status} {message.data.decode()}")

    async def run(self, frames: int) -> None:
        """Returns when so many frames have been delivered."""
        self._left, self._open = frames, 0
        self._done.clear()
        self.waits_s.clear()
        for _ in range(UNDER_WAY):
            self._send()
        await self._done.wait()
        await self._bus.flush()

    def _send(self) -> None:
        if self._left:
            self._left -= 1
            self._open += 1
            queue = next(self._queues)
            self._sent_s[queue.consumer].append(time.perf_counter())
            self._bus.publish(self._bus.live_layout.subject(queue), BODY, "stored.bench")

    def _came(self, queue: LiveQueue, pull: StandingPull, ack: str) -> None:
        pull.ack(ack)
        self._open -= 1
        self.waits_s.append(time.perf_counter() - self._sent_s[queue.consumer].pop(0))
        self._send()
        if not self._open:
            self._done.set()


async def measure(streams: int, models: int, partitions: int, frames: int) -> str:
    """One layout, with a nats-server of its own."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedNats(Path(folder))
        server.start()
        pid = server.pid or 0
        try:
            async with asyncio.TaskGroup() as background:
                bus = await Bus.connect(server.url, "bench", background)
                bus.live_layout = LiveLayout(streams)
                await ensure_streams(bus)
                queues = [LiveQueue(f"model_{m}", p) for m in range(models) for p in range(partitions)]
                traffic = Traffic(bus, queues)
                await bus.subscribe("stored.bench", traffic.stored)
                for queue in queues:
                    await traffic.pull(queue)
                await traffic.run(frames // 4)  # to warm up
                idle_s = cpu_s(pid)
                await asyncio.sleep(2.0)
                idle_s = (cpu_s(pid) - idle_s) / 2.0
                used_s, begun_s = cpu_s(pid), time.perf_counter()
                await traffic.run(frames)
                used_s, lasted_s = cpu_s(pid) - used_s, time.perf_counter() - begun_s
                waits = sorted(traffic.waits_s)
                await bus.close()
        finally:
            server.stop()
    return (
        f"{streams:3} streams, {models} models x {partitions}: nats-server {used_s / frames * 1e6:6.1f} us a frame, "
        f"{frames / lasted_s:6.0f} frames/s, delivered after p50 {waits[len(waits) // 2] * 1e3:.1f} ms, "
        f"p99 {waits[len(waits) * 99 // 100] * 1e3:.1f} ms; idle {idle_s * 100:.1f} % of a core"
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("streams", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--models", type=int, default=256)
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--frames", type=int, default=12_000)
    options = parser.parse_args()
    for streams in options.streams:
        print(uvloop.run(measure(streams, options.models, options.partitions, options.frames)), flush=True)


if __name__ == "__main__":
    main()

"""The network between hosts, as a process: `python -m tests.faults.switch SEED FD …` forwards frames between them.

Each descriptor is the TAP device of a host. Loss and delay are set by lines of JSON on the standard input:
`[from, to, share lost, delay in seconds]`. The kernel needs neither a traffic shaper nor a firewall.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import selectors
import sys
import time

_LARGEST_FRAME = 65_600
_MOST_LATE = 20_000
_BROADCAST = 1
"""The multicast bit: the lowest bit of an address's first byte."""


class Switch:
    """Forwards frames between TAP devices, with loss and delay for each direction."""

    def __init__(self, ports: list[int], seed: int) -> None:
        self._ports = ports
        self._draw = random.Random(seed)
        self._rules: dict[tuple[int, int], tuple[float, float]] = {}
        self._places: dict[bytes, int] = {}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def run(self) -> None:
        """Pass frames until the standard input is closed."""
        with selectors.DefaultSelector() as selector:
            for number, port in enumerate(self._ports):
                os.set_blocking(port, False)
                selector.register(port, selectors.EVENT_READ, number)
            os.set_blocking(0, False)
            selector.register(0, selectors.EVENT_READ, -1)
            text = b""
            while True:
                wait_s = self._late[0][0] - time.monotonic() if self._late else None
                for key, _ in selector.select(None if wait_s is None else max(0.0, wait_s)):
                    if key.data >= 0:
                        self._take(key.data)
                        continue
                    said = os.read(0, 65536)
                    if not said:
                        return
                    *lines, text = (text + said).split(b"\n")
                    for line in lines:
                        source, target, lost, delay_s = json.loads(line)
                        self._rules[source, target] = lost, delay_s
                self._pass_late()

    def _take(self, source: int) -> None:
        for _ in range(64):
            try:
                frame = os.read(self._ports[source], _LARGEST_FRAME)
            except (BlockingIOError, OSError):
                return
            self._places[frame[6:12]] = source
            target = None if frame[0] & _BROADCAST else self._places.get(frame[:6])
            for port in range(len(self._ports)) if target is None else (target,):
                if port != source:
                    self._pass(source, port, frame)

    def _pass(self, source: int, target: int, frame: bytes) -> None:
        lost, delay_s = self._rules.get((source, target), (0.0, 0.0))
        if lost and self._draw.random() < lost:
            return
        if not delay_s:
            self._give(target, frame)
        elif len(self._late) < _MOST_LATE:
            self._count += 1
            heapq.heappush(self._late, (time.monotonic() + delay_s, self._count, target, frame))

    def _pass_late(self) -> None:
        now_s = time.monotonic()
        while self._late and self._late[0][0] <= now_s:
            _, _, target, frame = heapq.heappop(self._late)
            self._give(target, frame)

    def _give(self, target: int, frame: bytes) -> None:
        try:
            os.write(self._ports[target], frame)
        except OSError:
            return  # its queue is full, as that of any network card


if __name__ == "__main__":
    Switch([int(fd) for fd in sys.argv[2:]], int(sys.argv[1])).run()

"""Schedulers that share queues in a simulated world: messages are delayed or lost, processes pause and resume.

The shell of each scheduler is a small form of `weir.scheduler.ownership.controller`: it reads a record, later writes it by
compare-and-set, and later still learns the result; anything may happen in between.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from weir.bus.naming.live_queues import LiveQueue
from weir.scheduler.ownership.policy import SILENCE_S, Acquire, Action, OwnershipPolicy, ReadOwner

SURE_S = 0.75
SIGN_S = 0.25


class Record(NamedTuple):
    owner: str = ""
    epoch: int = 0
    sequence: int = 0


class Store:
    """The bucket of records."""

    def __init__(self) -> None:
        self.records: dict[LiveQueue, Record] = {}
        self.losses = 0
        self._sequence = 0

    def read(self, queue: LiveQueue) -> Record:
        return self.records.get(queue, Record())

    def write(self, queue: LiveQueue, owner: str, after: Record, epoch: int) -> Record | None:
        if self.read(queue).sequence != after.sequence:
            return None
        self._sequence += 1
        self.records[queue] = Record(owner, epoch, self._sequence)
        return self.records[queue]

    def forget(self) -> None:
        self.records.clear()
        self.losses += 1
        self._sequence = 0


class Process:
    """One scheduler: `held` are the queues it believes to own. Events during a pause happen after it."""

    def __init__(self, world: World, name: str, skew_ms: int) -> None:
        self.world = world
        self.name = name
        self.skew_ms = skew_ms
        self.policy = OwnershipPolicy(name, lambda queue: queue not in self.fixed)
        self.fixed: set[LiveQueue] = set()
        self.held: dict[LiveQueue, Record] = {}
        self.is_alive = True
        self.paused_until_s = 0.0
        self.heard_s: dict[str, float] = {}
        self.sure_until_s = world.now_s + SURE_S
        self.ticked_s = world.now_s
        self.is_draining = False
        world.later(0.0, self, self.tick)

    @property
    def is_sure(self) -> bool:
        return self.world.now_s <= self.sure_until_s

    def tick(self) -> None:
        now_s = self.world.now_s
        if now_s - self.ticked_s > 2 * SIGN_S:
            self.heard_s = dict.fromkeys(self.heard_s, now_s)
        self.ticked_s = now_s
        for queue in [queue for queue in self.held if not self.is_sure or queue not in self.policy.held]:
            self.confirm(queue)
        self.sure_until_s = now_s + SURE_S
        for name, heard_s in list(self.heard_s.items()):
            other = self.world.processes[name]
            if now_s - heard_s > SILENCE_S or (not other.is_alive and self.world.draw.random() < 0.8):
                del self.heard_s[name]
                self.policy.scheduler_gone(name)
        for name in self.policy.others:
            if not self.world.processes[name].is_alive:
                self.policy.scheduler_gone(name)
        queues = {queue: record.epoch for queue, record in self.held.items()}
        self.world.tell(self, lambda to: to.hear(self.name, queues, self.is_draining))
        self.act()
        self.world.later(SIGN_S, self, self.tick)

    def confirm(self, queue: LiveQueue) -> None:
        mine, record = self.held[queue], self.world.store.read(queue)
        is_mine = (record.owner, record.epoch) == (self.name, mine.epoch)
        if not record.sequence or (is_mine and self.policy.highest_epoch(queue) > mine.epoch):
            written = self.world.store.write(queue, self.name, record, self.epoch(queue, mine))
            assert written is not None
            self.take(queue, written)
        elif not is_mine:
            self.drop(queue)
            self.policy.owner_reported(self.world.now_s, queue, record.owner, record.epoch)

    def hear(self, name: str, queues: dict[LiveQueue, int], is_draining: bool) -> None:
        self.heard_s[name] = self.world.now_s
        self.policy.scheduler_seen(self.world.now_s, name, queues, is_draining)
        self.act()

    def act(self) -> None:
        self.world.ticks += 1
        for action in self.policy.tick(self.world.now_s):
            self.world.actions[type(action).__name__] += 1
            self.world.acted_s = self.world.now_s
            self.world.later(self.world.delay(), self, lambda action=action: self.begin(action))

    def begin(self, action: Action) -> None:
        queue = action.queue
        if self.world.draw.random() < self.world.failures:
            self.policy.failed(self.world.now_s, queue)
            return
        if isinstance(action, ReadOwner):
            record = self.world.store.read(queue)
            self.policy.owner_reported(self.world.now_s, queue, record.owner, record.epoch)
        elif isinstance(action, Acquire):
            record = self.world.store.read(queue)
            if record.owner not in ("", self.name) and not self.policy.is_gone(record.owner):
                self.policy.owner_reported(self.world.now_s, queue, record.owner, record.epoch)
                return
            self.world.later(self.world.delay(), self, lambda: self.write(queue, self.name, record))
        else:
            record = self.held.get(queue)
            if record is None:
                self.policy.failed(self.world.now_s, queue)
                return
            self.drop(queue)
            self.world.later(self.world.delay(), self, lambda: self.write(queue, action.to, record))

    def write(self, queue: LiveQueue, owner: str, after: Record) -> None:
        written = self.world.store.write(queue, owner, after, self.epoch(queue, after))
        if written is None:
            self.policy.failed(self.world.now_s, queue)
            return
        losses = self.world.store.losses
        self.world.later(self.world.delay(), self, lambda: self.written(queue, written, losses))

    def written(self, queue: LiveQueue, written: Record, losses: int) -> None:
        now_s = self.world.now_s
        if written.owner == self.name:
            self.take(queue, written)
            if losses != self.world.store.losses:
                self.confirm(queue)
        else:
            self.policy.owner_reported(now_s, queue, written.owner, written.epoch)
        told = (queue, written.owner, written.epoch)
        self.world.tell(self, lambda to: to.policy.owner_reported(to.world.now_s, *told, is_read=False))

    def epoch(self, queue: LiveQueue, after: Record) -> int:
        clock_ms = int(self.world.now_s * 1000) + self.skew_ms
        return max(clock_ms, after.epoch + 1, self.policy.highest_epoch(queue) + 1)

    def take(self, queue: LiveQueue, record: Record) -> None:
        self.held[queue] = record
        self.policy.acquired(self.world.now_s, queue, record.epoch)
        self.world.check()

    def drop(self, queue: LiveQueue) -> None:
        self.held.pop(queue, None)
        self.policy.released(queue)


class World:
    """Several schedulers, one record store and the messages between them."""

    def __init__(self, seed: int, queues: int) -> None:
        self.draw = random.Random(seed)
        self.now_s = 1000.0  # clocks differ by seconds
        self.store = Store()
        self.queues = [LiveQueue(f"m{number // 2}", number % 2) for number in range(queues)]
        self.processes: dict[str, Process] = {}
        self.loss = 0.0
        self.failures = 0.0
        self.late_s = 0.05
        self.ticks = 0
        self.events = 0
        self.acted_s = 0.0
        self.actions: Counter[str] = Counter()
        self._order = count()
        self._agenda: list[tuple[float, int, Process, Callable[[], None]]] = []

    def start(self, skew_ms: int = 0) -> Process:
        name = f"s{len(self.processes)}"
        process = self.processes[name] = Process(self, name, skew_ms)
        process.policy.add_queues(self.now_s, self.queues)
        return process

    @property
    def alive(self) -> list[Process]:
        return [process for process in self.processes.values() if process.is_alive]

    def delay(self) -> float:
        return self.draw.uniform(0.0, self.late_s)

    def later(self, delay_s: float, process: Process, what: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now_s + delay_s, next(self._order), process, what))

    def tell(self, teller: Process, what: Callable[[Process], None]) -> None:
        for process in self.alive:
            if process is not teller and self.draw.random() >= self.loss:
                self.later(self.delay(), process, lambda process=process: what(process))

    def run(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self._agenda and self._agenda[0][0] <= until_s:
            at_s, order, process, what = heapq.heappop(self._agenda)
            self.now_s = max(self.now_s, at_s)
            if not process.is_alive:
                continue
            if process.paused_until_s > at_s:
                heapq.heappush(self._agenda, (process.paused_until_s, order, process, what))
                continue
            self.events += 1
            what()
            self.check()
        self.now_s = until_s

    def check(self) -> None:
        """Never two that believe to own a queue with the same epoch."""
        believed = Counter((q, r.epoch) for p in self.alive for q, r in p.held.items())
        assert all(number == 1 for number in believed.values()), believed.most_common(1)

    def owned(self) -> Counter[LiveQueue]:
        return Counter(queue for process in self.alive for queue in process.held)

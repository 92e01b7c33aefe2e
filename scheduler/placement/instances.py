"""`Instances`: decides which instance of a model version takes the next batch, over all workers that hold the version.

An instance may hold as many batches as its window has places: one executes, the others are staged behind it, so that
the device does not wait for the bus between two batches. Instances are filled breadth-first: the next batch goes to one
that holds the fewest, idle instances first, the longest idle of them first. A staged batch can not grow any more. So a
full batch is staged at once, and a batch that could still grow only shortly before the instance is expected to be free.

An instance is *closed* while its worker says that it can not run batches now, and opens again after a back-off or when
a batch of it ends. It is also closed to others while it holds a request that must not be lost together with others.

With workers on several hosts, a request whose payload lies on one of them goes to an idle instance of that host, if
there is one. It never waits for that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from weir.bus.naming.identity import host_of
from weir.scheduler.placement.window import MAX_WINDOW, SLOTS

STAGING_LEAD_US = 500
"""How long before the expected end of the executing batch a batch that could still grow is staged."""

FIRST_BACKOFF_US, MAX_BACKOFF_US = 20_000, 1_000_000
"""How long an instance that ran nothing stays closed: twice as long each time, until it has run something."""

_NEVER_US = 1 << 62


@dataclass(slots=True, eq=False)
class Instance:
    """One instance of a model version on one worker.

    `held` counts its batches, `begun_us` is the start of the executing one, `rows` and `staged_rows` are the sizes of
    the executing and the staged batch. `present` is False once the worker no longer offers the instance. It is closed
    until `opens_us` (0: open), and the next time for `backoff_us`.
    """

    worker: str
    number: int
    host: str = ""
    held: int = 0
    begun_us: int = 0
    rows: int = 0
    staged_rows: int = 0
    present: bool = True
    opens_us: int = 0
    backoff_us: int = FIRST_BACKOFF_US

    def __post_init__(self) -> None:
        self.host = host_of(self.worker)

    def __repr__(self) -> str:
        return f"Instance({self.worker}, {self.number}, held={self.held})"

    def stages_partial_at_us(self, us_per_row: float) -> int | None:
        """Returns when a batch that could still grow should be staged behind the executing one; None for never."""
        expected_us = us_per_row * self.rows
        if expected_us < 2 * STAGING_LEAD_US:
            # Such a short batch ends before waiting for it costs anything, and letting the next one grow saves more.
            return None
        return self.begun_us + int(expected_us) - STAGING_LEAD_US


class Instances:
    """The instances of one model version, and what they hold: `window` batches each. Times are microseconds."""

    def __init__(self) -> None:
        self._instances: dict[str, dict[int, Instance]] = {}  # by worker; removed ones too, while they hold batches
        self._workers: dict[str, int] = {}  # number of present instances
        # Present and open instances by the number of batches they hold, in the order in which they reached that number:
        # the first idle one is the longest idle, and the first one with one batch started it first. A plain dict keeps
        # that order too, but finding its first key scans all entries deleted before it.
        self._by_held = tuple(OrderedDict[Instance, None]() for _ in range(MAX_WINDOW + 1))
        self.closed: dict[Instance, None] = {}  # present instances that take no batch now
        self._fewest = 0  # no open instance holds fewer batches
        self.window = SLOTS
        self._hosts: dict[str, int] = {}  # number of workers on each host
        # Idle instances by host, in the same order; None while all are on one host, the common case.
        self._idle_on: dict[str, OrderedDict[Instance, None]] | None = None

    def __len__(self) -> int:
        return sum(map(len, self._by_held)) + len(self.closed)

    def workers(self) -> set[str]:
        """Returns the workers that hold an instance."""
        return set(self._workers)

    def set_instances(self, worker: str, count: int, numbers: Sequence[int] | None = None) -> None:
        """Sets the instances of `worker`: `count` of them, with these `numbers` (default: from 0 on).

        An instance that is removed finishes the batches it holds.
        """
        numbers = range(count) if numbers is None else numbers
        instances = self._instances.setdefault(worker, {})
        for number in numbers:
            self._add(instances, worker, number)
        removed = set(instances).difference(numbers)
        for instance in [instance for number, instance in instances.items() if number in removed and instance.present]:
            self._remove(instances, instance)
        host = host_of(worker)
        if count:
            if worker not in self._workers:
                self._hosts[host] = self._hosts.get(host, 0) + 1
            self._workers[worker] = count
        elif self._workers.pop(worker, None) is not None:
            self._hosts[host] -= 1
            if not self._hosts[host]:
                del self._hosts[host]
        if not instances:
            del self._instances[worker]
        if (len(self._hosts) > 1) != (self._idle_on is not None):
            self._sort_by_host()

    def next_slot(self) -> Instance | None:
        """Returns the instance for the next batch: of those with a place in their window the one that holds the fewest,
        and of these the one that has held that many for the longest time; None without any.
        """
        by_held, held, window = self._by_held, self._fewest, self.window
        while not by_held[held] and held < window:
            held += 1
        self._fewest = held
        return next(iter(by_held[held])) if held < window else None

    @property
    def idle(self) -> int:
        """Instances that hold no batch."""
        return len(self._by_held[0])

    def next_idle(self) -> Instance | None:
        """Returns the longest idle instance, or None."""
        idle = self._by_held[0]
        return next(iter(idle)) if idle else None

    def idle_near(self, host: str) -> Instance | None:
        """Returns the longest idle instance on `host`; None without one, or if all instances are on one host."""
        idle = self._idle_on.get(host) if self._idle_on is not None else None
        return next(iter(idle)) if idle else None

    def occupy(self, instance: Instance, now_us: int, rows: int = 1, alone: bool = False) -> None:
        """Records that `instance`, as returned by `next_slot`, holds one more batch, of `rows` rows.

        With `alone` it takes no other until this one has ended: one staged behind it would be lost with it.
        """
        held = instance.held
        if held == 0:
            instance.begun_us = now_us
            instance.rows = rows
            if self._idle_on is not None:
                del self._idle_on[instance.host][instance]
        else:
            instance.staged_rows = rows
        del self._by_held[held][instance]
        instance.held = held + 1
        if alone:
            instance.opens_us = _NEVER_US
            self.closed[instance] = None
        else:
            self._by_held[held + 1][instance] = None

    def free(self, instance: Instance, now_us: int, busy_us: int) -> None:
        """Records that `instance` has finished a batch that kept it busy for `busy_us` (0: unknown)."""
        if busy_us > 0:
            instance.backoff_us = FIRST_BACKOFF_US
        held = instance.held
        instance.begun_us = now_us  # start of the staged batch, if any
        instance.rows = instance.staged_rows
        instance.held = held - 1
        if instance.present:
            if instance.opens_us:
                if busy_us > 0 or instance.opens_us == _NEVER_US:
                    self._open(instance)
                return
            del self._by_held[held][instance]
            self._by_held[held - 1][instance] = None
            if held <= self._fewest:
                self._fewest = held - 1
            if held == 1 and self._idle_on is not None:
                self._idle_on.setdefault(instance.host, OrderedDict())[instance] = None
        elif held == 1:
            instances = self._instances[instance.worker]
            del instances[instance.number]
            if not instances:
                del self._instances[instance.worker]

    def close(self, instance: Instance, now_us: int) -> None:
        """Sends no batch to an instance whose worker returned one, for longer each time."""
        if not instance.present or instance.opens_us:
            return
        del self._by_held[instance.held][instance]
        if instance.held == 0 and self._idle_on is not None:
            del self._idle_on[instance.host][instance]
        instance.opens_us = now_us + instance.backoff_us
        instance.backoff_us = min(2 * instance.backoff_us, MAX_BACKOFF_US)
        self.closed[instance] = None

    def open_due(self, now_us: int) -> int | None:
        """Opens the instances whose back-off is over; returns when the next one opens by itself, None if none does."""
        for instance in [instance for instance in self.closed if instance.opens_us <= now_us]:
            self._open(instance)
        opens_us = min((instance.opens_us for instance in self.closed), default=_NEVER_US)
        return opens_us if opens_us < _NEVER_US else None

    def _open(self, instance: Instance) -> None:
        del self.closed[instance]
        instance.opens_us = 0
        self._add_open(instance)

    def _add_open(self, instance: Instance) -> None:
        self._by_held[instance.held][instance] = None
        self._fewest = min(self._fewest, instance.held)
        if instance.held == 0 and self._idle_on is not None:
            self._idle_on.setdefault(instance.host, OrderedDict())[instance] = None

    def _add(self, instances: dict[int, Instance], worker: str, number: int) -> None:
        instance = instances.get(number)
        if instance is None:
            instance = instances[number] = Instance(worker, number)
        elif instance.present:
            return
        instance.present = True
        if instance.opens_us:
            self.closed[instance] = None
        else:
            self._add_open(instance)

    def _remove(self, instances: dict[int, Instance], instance: Instance) -> None:
        instance.present = False
        if instance.opens_us:
            del self.closed[instance]
            if instance.opens_us < _NEVER_US:
                instance.opens_us = 0  # the worker knows better, if it offers the instance again
        else:
            del self._by_held[instance.held][instance]
            if instance.held == 0 and self._idle_on is not None:
                del self._idle_on[instance.host][instance]
        if instance.held == 0:
            del instances[instance.number]

    def _sort_by_host(self) -> None:
        self._idle_on = None
        if len(self._hosts) > 1:
            self._idle_on = {}
            for instance in self._by_held[0]:
                self._idle_on.setdefault(instance.host, OrderedDict())[instance] = None

"""`Placement`: which instance, of all workers that hold a model version, takes the next batch.

Each instance has two slots: one batch executes, one is staged behind it, so that the device need not wait for the bus
between two batches. A staged batch can't grow any more, so a batch that still could is staged only shortly before the
instance is expected to be free; a full one at once. Idle instances come first, the one idle for longest first.

Where workers are on several hosts, a request whose content lies on one of them goes to an idle instance there, if there is
one. It never waits for that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from bus.identity import host_of

STAGING_LEAD_US = 500
"""How long before the expected end of the executing batch one that could still grow is staged behind it."""

SLOTS = 2
_SMOOTHING = 0.2


class Instance:
    """One instance of the model version on one worker: how many batches it `held`, and when the executing one began.

    `rows` and `staged_rows` are the sizes of the executing batch and the one behind it.
    """

    __slots__ = ("begun_us", "held", "host", "number", "present", "rows", "staged_rows", "worker")

    def __init__(self, worker: str, number: int) -> None:
        self.worker = worker
        self.host = host_of(worker)
        self.number = number
        self.held = 0
        self.begun_us = 0
        self.rows = 0
        self.staged_rows = 0
        self.present = True

    def __repr__(self) -> str:
        return f"Instance({self.worker}, {self.number}, held={self.held})"


class Placement:
    """The slots of all instances of one model version. Times are microseconds."""

    def __init__(self) -> None:
        self._instances: dict[str, dict[int, Instance]] = {}  # by worker; absent ones too, while they hold batches
        self._workers: dict[str, int] = {}  # how many instances are present, where there are any
        # Present instances by the number of batches they hold, in the order in which they came to hold so many: the
        # first of the idle ones is idle for longest, and the first of those with one batch began it first. A plain dict
        # keeps that order too, but looks for its first key among all that were deleted before it.
        self._by_held: tuple[OrderedDict[Instance, None], ...] = tuple(OrderedDict() for _ in range(SLOTS + 1))
        self._us_per_row = 0.0
        self._hosts: dict[str, int] = {}  # how many of those workers are on each
        # The idle ones by host, in the same order; None as long as all are on one host, which most often they are.
        self._idle_on: dict[str, OrderedDict[Instance, None]] | None = None

    def __len__(self) -> int:
        return sum(map(len, self._by_held))

    def workers(self) -> set[str]:
        """Workers that hold an instance."""
        return set(self._workers)

    def set_instances(self, worker: str, count: int, numbers: Sequence[int] | None = None) -> None:
        """`worker` now has `count` instances, of these `numbers` (else from 0 on); one that is taken away finishes the
        batches it holds.
        """
        numbers = range(count) if numbers is None else numbers
        instances = self._instances.setdefault(worker, {})
        for number in numbers:
            self._add(instances, worker, number)
        gone = set(instances).difference(numbers)
        for instance in [instance for number, instance in instances.items() if number in gone and instance.present]:
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
        """The instance that the next batch goes to: an idle one, else the one that will be free first."""
        idle, executing, _ = self._by_held
        if idle:
            return next(iter(idle))
        return next(iter(executing)) if executing else None

    @property
    def free_places(self) -> int:
        """How many batches could be sent now."""
        idle, executing, _ = self._by_held
        return SLOTS * len(idle) + len(executing)

    @property
    def idle(self) -> int:
        """Instances that hold no batch."""
        return len(self._by_held[0])

    def next_idle(self) -> Instance | None:
        """The instance that the next batch goes to where none may wait behind another."""
        idle = self._by_held[0]
        return next(iter(idle)) if idle else None

    def idle_near(self, host: str) -> Instance | None:
        """The instance on `host` that is idle for longest; None where there is none, or all instances are on one host."""
        idle = self._idle_on.get(host) if self._idle_on is not None else None
        return next(iter(idle)) if idle else None

    def stage_partial_at_us(self, instance: Instance) -> int | None:
        """When a batch that could still grow should be staged behind the one executing; None for never."""
        expected_us = self._us_per_row * instance.rows
        if expected_us < 2 * STAGING_LEAD_US:
            # So short a batch is over before waiting for it costs anything, and letting the next one grow saves more.
            return None
        return instance.begun_us + int(expected_us) - STAGING_LEAD_US

    def occupy(self, instance: Instance, now_us: int, rows: int = 1) -> None:
        """`instance`, as `next_slot` gave it, holds one more batch, of so many rows."""
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
        self._by_held[held + 1][instance] = None

    def free(self, instance: Instance, now_us: int, busy_us: int) -> None:
        """`instance` is done with a batch that took it `busy_us` (0: not known)."""
        if busy_us > 0:
            # By the row, since the next batch may be of another size. Where larger batches are cheaper by the row, this
            # expects too much of them, and stages a little later: that costs a hop, a batch cut short costs rows.
            per_row = busy_us / max(1, instance.rows)
            known = self._us_per_row
            self._us_per_row = known + _SMOOTHING * (per_row - known) if known else per_row
        held = instance.held
        instance.begun_us = now_us  # of the staged batch, if there is one
        instance.rows = instance.staged_rows
        instance.held = held - 1
        if instance.present:
            del self._by_held[held][instance]
            self._by_held[held - 1][instance] = None
            if held == 1 and self._idle_on is not None:
                self._idle_on.setdefault(instance.host, OrderedDict())[instance] = None
        elif held == 1:
            instances = self._instances[instance.worker]
            del instances[instance.number]
            if not instances:
                del self._instances[instance.worker]

    def _add(self, instances: dict[int, Instance], worker: str, number: int) -> None:
        instance = instances.get(number)
        if instance is None:
            instance = instances[number] = Instance(worker, number)
        elif instance.present:
            return
        instance.present = True
        self._by_held[instance.held][instance] = None
        if instance.held == 0 and self._idle_on is not None:
            self._idle_on.setdefault(instance.host, OrderedDict())[instance] = None

    def _remove(self, instances: dict[int, Instance], instance: Instance) -> None:
        instance.present = False
        del self._by_held[instance.held][instance]
        if instance.held == 0:
            del instances[instance.number]
            if self._idle_on is not None:
                del self._idle_on[instance.host][instance]

    def _sort_by_host(self) -> None:
        self._idle_on = None
        if len(self._hosts) > 1:
            self._idle_on = {}
            for instance in self._by_held[0]:
                self._idle_on.setdefault(instance.host, OrderedDict())[instance] = None

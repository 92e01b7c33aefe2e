"""`DialPolicy`: to which owners of payloads a reader has links, and when it tries to open one. Sans-IO.

No payload waits for a link: without one, payloads go through the broker. A try requests the owner's address through the
broker, and connects. After a failure there is a pause, which grows with each further one until a link has served a
payload. Times are seconds of any clock.
"""

from __future__ import annotations

MAX_TCP_LINKS_OPENED = 256
"""Links of one reader, including tries; payloads of other owners go through the broker."""

MAX_OWNERS = 4096
"""Owners whose pauses are kept; more are not tried."""

TRY_TIMEOUT_S = 5.0
"""How long a try may take, from the request for the address on."""

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
"""The pause after the first failure, and the longest."""

IDLE_S = 60.0
"""A link that was not used for this long is closed."""


class _Owner:
    __slots__ = ("is_open", "pause_s", "since_s", "try_number", "until_s")

    def __init__(self) -> None:
        self.try_number = 0  # of the running try or of the link; 0: neither
        self.is_open = False
        self.since_s = 0.0  # start of the try, or last use of the link
        self.pause_s = 0.0  # the last one; 0: a link has served a payload since
        self.until_s = 0.0  # no try before


class DialPolicy:
    """Decides for one reader. Each try has a number, so that late events of an earlier one are recognised."""

    def __init__(self) -> None:
        self._owners: dict[str, _Owner] = {}
        self._tries: dict[int, str] = {}
        self._last = 0

    @property
    def connections(self) -> int:
        """The number of links and tries."""
        return len(self._tries)

    def is_open(self, owner: str) -> bool:
        """Whether there is a link."""
        known = self._owners.get(owner)
        return known is not None and known.is_open

    def wanted(self, owner: str, now_s: float) -> int:
        """A payload of an owner without a link is to be fetched: returns the number of a try to start, 0 for none."""
        known = self._owners.get(owner)
        if known is None:
            if len(self._owners) >= MAX_OWNERS:
                self._forget(now_s)
            if len(self._owners) >= MAX_OWNERS:
                return 0
            known = self._owners[owner] = _Owner()
        if known.try_number or now_s < known.until_s or len(self._tries) >= MAX_TCP_LINKS_OPENED:
            return 0
        self._last += 1
        known.try_number, known.since_s = self._last, now_s
        self._tries[self._last] = owner
        return self._last

    def owner_of(self, number: int) -> str:
        """The owner of a try, "" if it is over or has led to a link."""
        owner = self._tries.get(number, "")
        return "" if not owner or self._owners[owner].is_open else owner

    def opened(self, number: int, now_s: float) -> bool:
        """The try has connected; returns whether the link is still wanted."""
        owner = self.owner_of(number)
        if not owner:
            return False
        known = self._owners[owner]
        known.is_open, known.since_s = True, now_s
        return True

    def used(self, owner: str, now_s: float) -> None:
        """A fetch was started on the link."""
        known = self._owners.get(owner)
        if known is not None and known.is_open:
            known.since_s = now_s

    def served(self, owner: str, now_s: float) -> None:
        """A payload has arrived on the link."""
        self.used(owner, now_s)
        if self.is_open(owner):
            self._owners[owner].pause_s = 0.0

    def failed(self, number: int, now_s: float) -> None:
        """A try has failed, or a link was lost."""
        owner = self._tries.pop(number, "")
        if owner:
            known = self._owners[owner]
            known.try_number, known.is_open = 0, False
            known.pause_s = min(MAX_PAUSE_S, known.pause_s * 2 or FIRST_PAUSE_S)
            known.until_s = now_s + known.pause_s

    def tick(self, now_s: float) -> list[str]:
        """Handles timeouts: returns the owners whose idle links are to be closed."""
        idle: list[str] = []
        for number, owner in list(self._tries.items()):
            known = self._owners[owner]
            if not known.is_open and now_s - known.since_s >= TRY_TIMEOUT_S:
                self.failed(number, now_s)
            elif known.is_open and now_s - known.since_s >= IDLE_S:
                del self._tries[number], self._owners[owner]
                idle.append(owner)
        return idle

    def _forget(self, now_s: float) -> None:
        """Removes owners that were not used, because names of processes change."""
        for owner, known in list(self._owners.items()):
            if not known.try_number and now_s >= known.until_s:
                del self._owners[owner]

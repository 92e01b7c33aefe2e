"""`ConnectionCap`: bounds the connections of a process, over all of its ports, and makes room for new ones.

Promises, for a cap with the limit L:
- All clients have at most L connections, and one address at most 3 L / 4: so one client always leaves a quarter for others.
- A connection beyond that takes the place of an idle one: of one that has sent no request yet, or else of one that has been
  idle for `IDLE_S`. Of `EXAMINED` of these the one that has been idle longest is ended.
- A connection with a request in progress is never ended for another one: where none is idle, the new one is rejected.

No IO. Not thread-safe: in the event loop only.
"""

from __future__ import annotations

import ipaddress
import itertools
import logging
from typing import Protocol

from weir.runtime.limits.open_files import open_files_limit
from weir.runtime.log_limiter import LogLimiter

logger = logging.getLogger("weir.connections")

_limited = LogLimiter(logger)

MAX_CONNECTIONS = 16_384
"""Connections of clients to one process; at most three quarters of the files that it may open."""

IDLE_S = 1.0
"""How long a connection that has had a request must be idle before it gives room to another one: its client may be about to
send the next."""

EXAMINED = 64
"""Connections that are looked at to find room for one."""

SILENT, DISPLACED, REJECTED = "silent", "displaced", "rejected"
"""Why connections were ended: they sent nothing, or not all of their first request; they were idle and gave room to others;
there was no room for them."""

_SITE_PREFIX = 64  # bits of an IPv6 address that identify a site: its hosts choose the rest freely


class CappedConnection(Protocol):
    """A connection that may be ended to make room."""

    @property
    def has_served(self) -> bool:
        """Whether it has had a request."""

    def idle_s(self) -> float:
        """For how long it has been idle, since it was made or since its last request ended; 0 while one is in progress."""

    def make_room(self) -> None:
        """Ends the connection, which is idle."""


class ConnectionCap:
    """The connections of one process. `ended` counts those that were ended or rejected, by reason."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.ended = {SILENT: 0, DISPLACED: 0, REJECTED: 0}
        self._all: dict[CappedConnection, str] = {}  # with their principals; those looked at last come last
        self._by_principal: dict[str, dict[CappedConnection, str]] = {}

    @classmethod
    def of_process(cls) -> ConnectionCap:
        """The cap for a process with this one's limit of open files."""
        return cls(min(MAX_CONNECTIONS, open_files_limit() * 3 // 4))

    @property
    def share(self) -> int:
        """The most connections that one principal may have."""
        return max(1, self.limit * 3 // 4)

    @property
    def open(self) -> int:
        """How many connections there are."""
        return len(self._all)

    def admit(self, connection: CappedConnection, principal: str) -> bool:
        """Counts a new connection until `remove`. Returns False, and counts nothing, if it must be rejected."""
        own = self._by_principal.get(principal, {})
        if len(own) >= self.share:
            if not self._make_room(own, principal, len(own)):
                return False
        elif len(self._all) >= self.limit and not self._make_room(self._all, principal, len(own)):
            return False
        self._all[connection] = principal
        self._by_principal.setdefault(principal, {})[connection] = principal
        return True

    def counts(self, connection: CappedConnection) -> bool:
        """Whether the connection was admitted, and neither removed nor ended to make room."""
        return connection in self._all

    def remove(self, connection: CappedConnection) -> None:
        """Forgets a connection, which has ended; one that was not admitted, or gave room, is forgotten already."""
        principal = self._all.pop(connection, None)
        if principal is not None:
            own = self._by_principal[principal]
            del own[connection]
            if not own:
                del self._by_principal[principal]

    def count_silent(self) -> None:
        """Counts a connection that is ended because it did not send its first request in time."""
        self.ended[SILENT] += 1

    def _make_room(self, crowd: dict[CappedConnection, str], principal: str, of_principal: int) -> bool:
        idlest = self._idlest(crowd)
        figures = principal, of_principal, self.share, len(self._all), self.limit
        counts = "it has %d of at most %d, all clients have %d of at most %d"
        if idlest is None:
            self.ended[REJECTED] += 1
            _limited.warning(REJECTED, f"rejected a connection from %s, as none is idle: {counts}", *figures)
            return False
        self.ended[DISPLACED] += 1
        _limited.warning(DISPLACED, f"ended an idle connection for a new one from %s: {counts}", *figures)
        self.remove(idlest)
        idlest.make_room()
        return True

    def _idlest(self, crowd: dict[CappedConnection, str]) -> CappedConnection | None:
        """The connection to end, of the next `EXAMINED` in `crowd`; the next call looks at others. None if none is idle."""
        examined = list(itertools.islice(crowd.items(), EXAMINED))
        found: CappedConnection | None = None
        most: tuple[bool, float] = (False, 0.0)
        for connection, principal in examined:
            del crowd[connection]
            crowd[connection] = principal
            idle_s = connection.idle_s()
            is_idle = idle_s >= IDLE_S if connection.has_served else idle_s > 0
            if is_idle and (not connection.has_served, idle_s) > most:
                found, most = connection, (not connection.has_served, idle_s)
        return found


def principal_of(address: str | None) -> str:
    """The name under which a client is counted: its IPv4 address, or the /64 network of its IPv6 address."""
    try:
        ip = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return "unknown"
    if ip.version == 4:
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((int(ip), _SITE_PREFIX), strict=False))

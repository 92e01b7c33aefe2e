"""`ServerPool`: the servers of a NATS cluster: those we were told, and those that servers told us since.

A state machine without a clock or a socket: who is tried next, and whether a server has gone.
Source: `connect_urls` and `cluster` in the INFO of the NATS client protocol.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from bus.broker_access import BrokerServer

MAX_DISCOVERED = 64
"""Servers that are known from others alone."""

_CLUSTER_REPLICAS = 3


class ServerPool:
    """See the module. `urls` are tried in any order, so that the processes of a cluster spread over its servers."""

    def __init__(self, urls: Sequence[str], shuffle: Any = random.shuffle) -> None:
        self._told = list(dict.fromkeys(BrokerServer.of(url) for url in urls))
        self.first = self._told[0]
        self._order = list(self._told)
        shuffle(self._order)
        self._listed = 0
        self._is_cluster = False
        self.current: BrokerServer | None = None

    @property
    def hosts(self) -> list[str]:
        """The hosts we were told."""
        return [server.host for server in self._told]

    @property
    def is_clustered(self) -> bool:
        """Whether there is more than one server."""
        return len(self._order) > 1 or self._listed > 1

    @property
    def replicas(self) -> int:
        """How many servers should keep what is stored: three where the cluster has as many, else one."""
        known = max(len(self._told), self._listed) if self._is_cluster else 1
        return _CLUSTER_REPLICAS if known >= _CLUSTER_REPLICAS else 1

    def candidates(self) -> list[BrokerServer]:
        """All servers in the order in which they are tried now: the one that was lost comes last, for it may hang."""
        if self.current is not None and self.current in self._order:
            self._order.remove(self.current)
            self._order.append(self.current)
        return list(self._order)

    def learn(self, info: Mapping[str, Any]) -> bool:
        """Takes what the server we are connected to says of its cluster; returns whether one has gone from it."""
        listed = info.get("connect_urls")
        self._is_cluster = self._is_cluster or bool(info.get("cluster"))
        if not isinstance(listed, list):
            return False
        read = map(self._read, listed[:MAX_DISCOVERED])
        servers = list(dict.fromkeys(server for server in read if server is not None))
        has_gone = len(servers) < self._listed
        self._listed = len(servers)
        addresses = {(server.host, server.port) for server in self._told}
        found = [server for server in servers if (server.host, server.port) not in addresses]
        self._order = [s for s in self._order if s in self._told or s in found or s == self.current]
        self._order += [server for server in found if server not in self._order]
        return has_gone

    def _read(self, url: Any) -> BrokerServer | None:
        try:
            server = BrokerServer.of(url) if isinstance(url, str) and url else None
        except ValueError:
            return None
        # Servers tell addresses alone: how to speak there, and who we are, is as we were told of the first.
        first = self.first
        return server and server._replace(is_tls=first.is_tls, user=first.user, password=first.password)

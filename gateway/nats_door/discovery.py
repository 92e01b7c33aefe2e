"""`MicroService`: what `nats micro ls`, `info` and `stats` are told of the door.

nats-py's own service awaits one request before it takes the next, so only its descriptions are used.
Source: NATS ADR-32 (service API).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

from nats.micro.service import EndpointInfo, EndpointStats, ServiceInfo, ServicePing, ServiceStats

from bus import subjects
from bus.connection import Bus, Message
from bus.reserved_subjects import may_answer

NAME = "weir"
DESCRIPTION = (
    "Inference: a KServe v2 request to infer.<model> or infer.<model>.v<version> is answered with its response"
)
_METADATA = {"protocol": "kserve-v2"}


class Endpoint:
    """One endpoint: its subject, and counters of what came there."""

    def __init__(self, name: str, subject: str) -> None:
        self.name = name
        self.subject = subject
        self.requests = 0
        self.errors = 0
        self.last_error = ""
        self.busy_ns = 0

    def ended(self, busy_ns: int, error: str) -> None:
        """A request has had its last answer."""
        self.busy_ns += busy_ns
        if error:
            self.errors += 1
            self.last_error = error

    def info(self) -> EndpointInfo:
        """What it is."""
        return EndpointInfo(self.name, self.subject, subjects.INFER_QUEUE, {})

    def stats(self) -> EndpointStats:
        """What it has done."""
        average_ns = self.busy_ns // self.requests if self.requests else 0
        return EndpointStats(
            self.name,
            self.subject,
            subjects.INFER_QUEUE,
            self.requests,
            self.errors,
            self.busy_ns,
            average_ns,
            self.last_error,
        )


class MicroService:
    """See the module. `id` tells one gateway from the others."""

    def __init__(self, bus: Bus, id: str, version: str, endpoints: list[Endpoint]) -> None:
        self._bus = bus
        self._id = id
        self._version = version
        self._endpoints = endpoints
        self._started = datetime.now(UTC)
        self._unsubscribe: list[Callable[[], None]] = []

    async def start(self) -> None:
        """Answers from now on."""
        for verb, told in (("PING", self._ping), ("INFO", self._info), ("STATS", self._stats)):
            for subject in (f"$SRV.{verb}", f"$SRV.{verb}.{NAME}", f"$SRV.{verb}.{NAME}.{self._id}"):
                self._unsubscribe.append(await self._bus.subscribe(subject, partial(self._tell, told)))

    def stop(self) -> None:
        """Answers no more: nobody is to find a service that leaves."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()

    def _tell(self, told: Callable[[], Any], message: Message) -> None:
        if may_answer(message):
            self._bus.publish(message.reply, json.dumps(told().to_dict()).encode())

    def _ping(self) -> ServicePing:
        return ServicePing(self._id, NAME, self._version, _METADATA)

    def _info(self) -> ServiceInfo:
        endpoints = [endpoint.info() for endpoint in self._endpoints]
        return ServiceInfo(NAME, self._id, self._version, DESCRIPTION, endpoints, _METADATA)

    def _stats(self) -> ServiceStats:
        endpoints = [endpoint.stats() for endpoint in self._endpoints]
        return ServiceStats(self._id, NAME, self._version, self._started, endpoints, _METADATA)

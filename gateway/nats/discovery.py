"""`MicroService`: answers `nats micro ls`, `info` and `stats` about the NATS frontend.

nats-py's own service handles one request after the other, so only its data classes are used.
Source: NATS ADR-32 (service API).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

from nats.micro.service import EndpointInfo, EndpointStats, ServiceInfo, ServicePing, ServiceStats

from weir.bus.naming import subjects
from weir.bus.naming.reserved_subjects import may_reply_to
from weir.bus.nats.connection import Bus, Message

NAME = "weir"
DESCRIPTION = (
    "Inference: a KServe v2 request to infer.<model> or infer.<model>.v<version> is answered with its response"
)
_METADATA = {"protocol": "kserve-v2"}


class Endpoint:
    """One endpoint: its subject, and counters of its requests."""

    def __init__(self, name: str, subject: str) -> None:
        self.name = name
        self.subject = subject
        self.requests = 0
        self.errors = 0
        self.last_error = ""
        self.busy_ns = 0

    def count(self, busy_ns: int, error: str) -> None:
        """Counts a request that has had its last response."""
        self.busy_ns += busy_ns
        if error:
            self.errors += 1
            self.last_error = error

    def info(self) -> EndpointInfo:
        """The description of the endpoint."""
        return EndpointInfo(self.name, self.subject, subjects.INFER_QUEUE, {})

    def stats(self) -> EndpointStats:
        """The counters of the endpoint."""
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
    """The service of one gateway, which `id` identifies."""

    def __init__(self, bus: Bus, id: str, version: str, endpoints: list[Endpoint]) -> None:
        self._bus = bus
        self._id = id
        self._version = version
        self._endpoints = endpoints
        self._started = datetime.now(UTC)
        self._unsubscribe: list[Callable[[], None]] = []

    async def start(self) -> None:
        """Subscribes to the subjects of the service API."""
        for verb, describe in (("PING", self._ping), ("INFO", self._info), ("STATS", self._stats)):
            for subject in (f"$SRV.{verb}", f"$SRV.{verb}.{NAME}", f"$SRV.{verb}.{NAME}.{self._id}"):
                self._unsubscribe.append(await self._bus.subscribe(subject, partial(self._reply, describe)))

    def stop(self) -> None:
        """Unsubscribes, so that clients don't discover a service that stops."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()

    def _reply(self, describe: Callable[[], Any], message: Message) -> None:
        if may_reply_to(message):
            self._bus.publish(message.reply, json.dumps(describe().to_dict()).encode())

    def _ping(self) -> ServicePing:
        return ServicePing(self._id, NAME, self._version, _METADATA)

    def _info(self) -> ServiceInfo:
        endpoints = [endpoint.info() for endpoint in self._endpoints]
        return ServiceInfo(NAME, self._id, self._version, DESCRIPTION, endpoints, _METADATA)

    def _stats(self) -> ServiceStats:
        endpoints = [endpoint.stats() for endpoint in self._endpoints]
        return ServiceStats(self._id, NAME, self._version, self._started, endpoints, _METADATA)

"""`DurabilityCheck`: finds out whether nats-server syncs a message to disk before it acknowledges it.

nats-server acknowledges at once and syncs every two minutes, unless it has `sync_interval: always`. A killed server loses
nothing either way; a power loss may lose messages that were not synced. For the embedded server its configuration is
known. Another server is asked in the system account, if the role is in that, else on its monitoring port.
Source: nats-server 2.15's `/jsz` and `$SYS.REQ.SERVER.PING.JSZ`: `config.sync_interval` (ns), and `config.sync_always`,
which is left out when it is false.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import logging
import os
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

import orjson

from weir.bus.nats.connection import Bus, Message
from weir.bus.nats.embedded_server import SYNCED_SERVER_VARIABLE

logger = logging.getLogger("weir.bus")

_PING = "$SYS.REQ.SERVER.PING.JSZ"
_PING_TIMEOUT_S = 0.5
_FETCH_TIMEOUT_S = 2.0
_MAX_RESPONSE_BYTES = 1 << 20
_USUAL_PORT = 8222


class Durability(NamedTuple):
    """Whether an acknowledged message is on disk (None: unknown), and the reason for that statement."""

    ack_is_fsync: bool | None
    reason: str

    @property
    def word(self) -> str:
        """The answer in one word: "yes", "no" or "unknown"."""
        return {True: "yes", False: "no", None: "unknown"}[self.ack_is_fsync]


EMBEDDED = Durability(True, "the embedded nats-server syncs before it acknowledges")
YES = Durability(True, "the NATS server syncs before it acknowledges")
NO = Durability(False, "the NATS server acknowledges before it syncs: a power loss may lose what it accepted")
NOT_ASKED = Durability(None, "not determined yet")


def unknown(why: str) -> Durability:
    """An unknown durability. `why` is the first half of the reason."""
    return Durability(None, f"{why}; name its monitoring URL with --nats-monitor")


class DurabilityCheck:
    """Determines the durability at the start and after each reconnection; `result` is the last one.

    `monitors` are monitoring URLs of the server or, separated by commas, of all servers of its cluster.
    """

    def __init__(self, bus: Bus, monitors: str = "") -> None:
        self._bus = bus
        self._monitors = [url.strip().rstrip("/") for url in monitors.split(",") if url.strip()]
        self.result = NOT_ASKED

    async def start(self) -> None:
        """Determines the durability. Logs a warning unless acknowledged messages are on disk."""
        await self._check()
        self._bus.on_reconnect(self._check)

    async def _check(self) -> None:
        result = await self._determine()
        if result != self.result and result.ack_is_fsync is not True:
            logger.warning("durable requests: ack = fsync: %s (%s)", result.word, result.reason)
        elif result != self.result:
            logger.info("durable requests: ack = fsync: yes (%s)", result.reason)
        self.result = result

    async def _determine(self) -> Durability:
        info = self._bus.server_info
        ours = os.environ.get(SYNCED_SERVER_VARIABLE)
        if ours and info.get("server_name") == ours:
            return EMBEDDED
        responses = await self._ping()
        if not responses and self._monitors:
            responses, problem = await self._read_monitors(self._monitors)
            if problem:
                return unknown(problem)
        elif not responses:
            hosts = [f"[{host}]" if ":" in host else host for host in self._bus.hosts if _is_loopback(host)]
            # Any program may listen there: only the response of the connected server counts.
            found, _ = await self._read_monitors([f"http://{host}:{_USUAL_PORT}" for host in hosts])
            responses = [response for response in found if response.get("server_id") == info.get("server_id")]
            if not responses:
                return unknown("the NATS server does not report whether it syncs before it acknowledges")
        return _conclusion(responses, info)

    async def _ping(self) -> list[dict[str, Any]]:
        """The responses of all servers, which only a user of the system account gets."""
        responses: list[dict[str, Any]] = []
        is_one_of_many = "cluster" in self._bus.server_info

        def is_complete(message: Message) -> bool:
            data = {} if message.status else _read(message.data).get("data")
            if data and isinstance(data, dict):
                responses.append(data)
            return bool(message.status) or not is_one_of_many

        await self._bus.jetstream.replies.gather([_PING], b"", is_complete, timeout_s=_PING_TIMEOUT_S)
        return responses

    async def _read_monitors(self, urls: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
        """The responses of monitors, and the problem of the first without one."""
        responses, problem = [], ""
        for url in urls:
            try:
                responses.append(_read(await asyncio.to_thread(_fetch, f"{url}/jsz?config=true")))
            except (OSError, ValueError) as error:
                problem = problem or f"its monitor does not respond at {_without_secrets(url)}: {error}"
        return responses, problem


def _conclusion(responses: Sequence[Mapping[str, Any]], info: Mapping[str, Any]) -> Durability:
    syncs = [_syncs(response) for response in responses]
    if False in syncs:
        return NO
    if None in syncs or not syncs:
        return unknown("the NATS server does not report whether it syncs before it acknowledges")
    if "cluster" in info:
        if len({response.get("server_id") for response in responses}) < 2:
            return unknown("it is part of a cluster, and only one of its servers was asked")
    elif info.get("server_id") not in {response.get("server_id") for response in responses}:
        return unknown("the monitoring URL is that of another server")
    return YES


def _syncs(response: Mapping[str, Any]) -> bool | None:
    config = response.get("config")
    if not isinstance(config, dict) or not ("sync_interval" in config or "sync_always" in config):
        return None
    return config.get("sync_always") is True


def _read(data: bytes) -> dict[str, Any]:
    try:
        response = orjson.loads(data)
    except ValueError:
        return {}
    return response if isinstance(response, dict) else {}


def _fetch(url: str) -> bytes:
    """The content of an HTTP URL, which may have a user and a password. Blocking. Raises OSError or ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError("it must be an http:// or https:// URL")
    user, at, place = parts.netloc.rpartition("@")
    # urllib would take the user for a part of the host, and show the password in its error.
    request = urllib.request.Request(urlunsplit(parts._replace(netloc=place)))  # noqa: S310 - checked above
    if at:
        request.add_header("Authorization", f"Basic {base64.b64encode(unquote(user).encode()).decode()}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_FETCH_TIMEOUT_S) as response:
        content: bytes = response.read(_MAX_RESPONSE_BYTES)
        return content


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _without_secrets(url: str) -> str:
    return url.rsplit("@", 1)[-1]

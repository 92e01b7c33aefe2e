"""What an acknowledgement of the NATS server means: whether what it has accepted into a file is on disk by then.

nats-server acknowledges at once and syncs every two minutes, unless it is told `sync_interval: always`. A killed server
loses nothing either way; a power loss may lose what was not synced. So we ask, and tell what we were told: of the embedded
server its configuration, of another the system account's answer where we are in that, else its monitoring port's.
Source: nats-server 2.15's `/jsz` and `$SYS.REQ.SERVER.PING.JSZ`: `config.sync_interval` (ns), and `config.sync_always`,
which is left out when it is false.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import orjson

from bus.connection import Bus, Message
from bus.embedded import SYNCED_SERVER_VARIABLE
from bus.identity import new_id

logger = logging.getLogger("weir.bus")

_PING = "$SYS.REQ.SERVER.PING.JSZ"
_PING_PATIENCE_S = 0.5
_FETCH_TIMEOUT_S = 2.0
_MAX_ANSWER_BYTES = 1 << 20
_USUAL_PORT = 8222


class Durability(NamedTuple):
    """Whether an acknowledgement says that it is on disk (None: nobody told us), and why we say so."""

    ack_is_fsync: bool | None
    reason: str

    @property
    def word(self) -> str:
        """For people: "yes", "no" or "unknown"."""
        return {True: "yes", False: "no", None: "unknown"}[self.ack_is_fsync]


EMBEDDED = Durability(True, "the embedded nats-server syncs before it acknowledges")
YES = Durability(True, "the NATS server syncs before it acknowledges")
NO = Durability(False, "the NATS server acknowledges before it syncs: a power loss may lose what it accepted")
NOT_ASKED = Durability(None, "not known yet")


def unknown(why: str) -> Durability:
    """Nobody has told; `why` is a half-sentence."""
    return Durability(None, f"{why}; name its monitoring URL with --nats-monitor")


class DurabilityCheck:
    """Finds out at the start and whenever another server may be there; `told` is what it found last.

    `monitors` are monitoring URLs of the server or, separated by commas, of all servers of its cluster.
    """

    def __init__(self, bus: Bus, monitors: str = "") -> None:
        self._bus = bus
        self._monitors = [url.strip().rstrip("/") for url in monitors.split(",") if url.strip()]
        self.told = NOT_ASKED

    async def start(self) -> None:
        """Finds out, and says so in the log where an acknowledgement is not known to mean that it is on disk."""
        await self._look()
        self._bus.on_reconnect(self._look)

    async def _look(self) -> None:
        told = await self._find_out()
        if told != self.told and told.ack_is_fsync is not True:
            logger.warning("durable requests: ack = fsync: %s (%s)", told.word, told.reason)
        elif told != self.told:
            logger.info("durable requests: ack = fsync: yes (%s)", told.reason)
        self.told = told

    async def _find_out(self) -> Durability:
        info = self._bus.server_info
        ours = os.environ.get(SYNCED_SERVER_VARIABLE)
        if ours and info.get("server_name") == ours:
            return EMBEDDED
        answers = await self._ping()
        if not answers and self._monitors:
            answers, problem = await self._ask_monitors(self._monitors)
            if problem:
                return unknown(problem)
        elif not answers:
            hosts = [f"[{host}]" if ":" in host else host for host in self._bus.hosts if _is_loopback(host)]
            # Who listens there may be anybody: only what our server says counts.
            told, _ = await self._ask_monitors([f"http://{host}:{_USUAL_PORT}" for host in hosts])
            answers = [answer for answer in told if answer.get("server_id") == info.get("server_id")]
            if not answers:
                return unknown("the NATS server does not tell whether it syncs before it acknowledges")
        return _conclusion(answers, info)

    async def _ping(self) -> list[dict[str, Any]]:
        """What each server says to who is in the system account; nothing to all others."""
        answers: list[dict[str, Any]] = []
        is_over = asyncio.Event()
        is_one_of_many = "cluster" in self._bus.server_info

        def take(message: Message) -> None:
            told = {} if message.status else _read(message.data)
            if isinstance(told.get("data"), dict):
                answers.append(told["data"])
            if message.status or not is_one_of_many:
                is_over.set()

        inbox = f"{self._bus.inbox_prefix}.{new_id('durability')}"
        unsubscribe = await self._bus.subscribe(inbox, take)
        try:
            self._bus.publish(_PING, b"", inbox)
            async with asyncio.timeout(_PING_PATIENCE_S):
                await is_over.wait()
        except TimeoutError:
            pass
        finally:
            unsubscribe()
        return answers

    async def _ask_monitors(self, urls: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
        """Their answers, and what was wrong with the first that gave none."""
        answers, problem = [], ""
        for url in urls:
            try:
                answers.append(_read(await asyncio.to_thread(_fetch, f"{url}/jsz?config=true")))
            except (OSError, ValueError) as error:
                problem = problem or f"its monitor does not answer at {_without_secrets(url)}: {error}"
        return answers, problem


def _conclusion(answers: Sequence[Mapping[str, Any]], info: Mapping[str, Any]) -> Durability:
    told = [_syncs(answer) for answer in answers]
    if False in told:
        return NO
    if None in told or not told:
        return unknown("the NATS server does not tell whether it syncs before it acknowledges")
    if "cluster" in info:
        if len({answer.get("server_id") for answer in answers}) < 2:
            return unknown("it is one of a cluster, and only one of its servers was asked")
    elif info.get("server_id") not in {answer.get("server_id") for answer in answers}:
        return unknown("the monitor is another server's")
    return YES


def _syncs(answer: Mapping[str, Any]) -> bool | None:
    config = answer.get("config")
    if not isinstance(config, dict) or not ("sync_interval" in config or "sync_always" in config):
        return None
    return config.get("sync_always") is True


def _read(data: bytes) -> dict[str, Any]:
    try:
        told = orjson.loads(data)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _fetch(url: str) -> bytes:
    """What is at an HTTP URL. Blocking. Raises OSError or ValueError."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("it must be an http:// or https:// URL")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=_FETCH_TIMEOUT_S) as answer:
        content: bytes = answer.read(_MAX_ANSWER_BYTES)
        return content


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _without_secrets(url: str) -> str:
    return url.rsplit("@", 1)[-1]

"""Makes a consumer anew: deletes it, and makes one of the same name that knows of no delivery.

In a cluster the server that leads JetStream's API draws which of them is to lead a new consumer, and it may draw one that
was just killed, or hangs: it learns of that late. Nobody answers for such a consumer until the others have missed that
leader, for 4 to 9 s. But who asks for another has another drawn: so there is little patience with one that does not answer.
Source: nats-server's jetstream_cluster.go (`setPreferred`), raft.go (election timeouts); measured with 2.15.1.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from nats.errors import Error as NatsError
from nats.js.errors import APIError, NotFoundError

from bus.connection import Bus
from bus.patient_jetstream import PATIENCE_S, is_passing

logger = logging.getLogger("weir.bus")

TRY_S = 0.6
"""How long a new consumer of a cluster is waited for at first, which takes some hundredths of a second."""

_LATER_TRIES_S = (0.8, 1.0)
ELECTION_S = 10.0
"""How long the last one is waited for, and one that there is: the others choose a leader in that time."""

_REFUSALS = 2
_WAIT_S = 0.05


async def make_anew(bus: Bus, stream: str, config: Mapping[str, Any]) -> str:
    """Makes the durable consumer of `config`, as JetStream's API takes it, in place of what there is of that name.

    Returns the server of a cluster that leads it, "" where there is no cluster.

    Raises APIError for what JetStream refuses: BadRequestError where another has made it in between; NatsError, OSError or
    TimeoutError while the broker is away.
    """
    if not bus.is_clustered:
        await delete_consumer(bus, stream, config["name"])
        return await create_consumer(bus, stream, config)
    until_s = time.monotonic() + PATIENCE_S
    try_s, later_s, is_deleted = TRY_S, iter(_LATER_TRIES_S), False
    while True:
        try:
            if not is_deleted:  # else what was asked for would be taken for what there is
                await delete_consumer(bus, stream, config["name"], min(try_s, TRY_S))
                is_deleted = True
            return await create_consumer(bus, stream, config, try_s)
        except (NatsError, TimeoutError) as error:
            if not is_passing(error) or time.monotonic() >= until_s:
                raise
            logger.debug("%s: consumer %s is not made yet: %s", stream, config["name"], type(error).__name__)
        if is_deleted:
            # Who is asked for one that nobody leads does not say that it has gone, but the next time that it is not there.
            is_deleted, try_s = False, next(later_s, ELECTION_S)
        await asyncio.sleep(_WAIT_S)


async def deliver_again(bus: Bus, stream: str, name: str, group: str) -> str:
    """Has a consumer of a cluster deliver again all that is not acknowledged, as one that is made anew would.

    It asks the server that leads the consumer, and so waits for no other leader. Returns which that is; "" where there is
    no such consumer with this priority group, nobody leads it for `ELECTION_S`, or nats-server is too old for it or does
    not let us: then it must be made anew.
    Source: JetStream's API CONSUMER.RESET, from nats-server 2.14 on.
    """
    until_s = time.monotonic() + ELECTION_S
    refusals = 0
    while time.monotonic() < until_s and refusals < _REFUSALS:
        try:
            known = await bus.ask(f"$JS.API.CONSUMER.INFO.{stream}.{name}", None, TRY_S)
            _check(known)
            if known.get("config", {}).get("priority_groups") != [group]:
                return ""
            leader, refusals = _leader(known), refusals + 1
            _check(await bus.ask(f"$JS.API.CONSUMER.RESET.{stream}.{name}", {}, TRY_S))
            return leader
        except (NatsError, TimeoutError) as error:
            if not is_passing(error):
                return ""
        await asyncio.sleep(_WAIT_S)
    return ""


async def delete_consumer(bus: Bus, stream: str, name: str, once_s: float | None = None) -> None:
    """Deletes a consumer, if it is there. Raises as `make_anew`; `once_s` as for `Bus.ask`."""
    try:
        _check(await bus.ask(f"$JS.API.CONSUMER.DELETE.{stream}.{name}", None, once_s))
    except NotFoundError:
        pass


async def create_consumer(bus: Bus, stream: str, config: Mapping[str, Any], once_s: float | None = None) -> str:
    """Makes a consumer where there is none of that name. Returns and raises as `make_anew`; `once_s` as for `Bus.ask`.

    Not through nats-py, whose ConsumerConfig knows of no groups.
    """
    question = {"stream_name": stream, "action": "create", "config": config}
    answer = await bus.ask(f"$JS.API.CONSUMER.CREATE.{stream}.{config['name']}", question, once_s)
    _check(answer)
    return _leader(answer)


async def leader_of_consumer(bus: Bus, stream: str, name: str) -> str:
    """The server of a cluster that leads a consumer and answers for it just now; "" for none. Asks once."""
    try:
        return _leader(await bus.ask(f"$JS.API.CONSUMER.INFO.{stream}.{name}", None, TRY_S))
    except (NatsError, OSError, TimeoutError):
        return ""


def _leader(answer: Mapping[str, Any]) -> str:
    cluster = answer.get("cluster")
    return str(cluster.get("leader", "")) if isinstance(cluster, dict) else ""


def _check(answer: Mapping[str, Any]) -> None:
    if "error" in answer:
        APIError.from_error(answer["error"])

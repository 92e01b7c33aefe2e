"""Aligned periodic work: what runs periodically in the processes of a host runs at the same moments.

A wake-up of an idle process costs 0.1 to 0.3 ms of processor time, mostly cold caches, and hardly depends on what is
done in it. So tasks with the same interval wake up together, tasks with a multiple of it wake up with them, and
messages of several processes reach nats-server in one of its wake-ups. The moments are multiples of the interval on
the event loop's clock, which is the host's monotonic clock.
"""

from __future__ import annotations

import asyncio


def delay_to_tick_s(now_s: float, interval_s: float) -> float:
    """Returns the time from `now_s` to the next multiple of `interval_s` that is at least half an interval away.

    So a timer that fires slightly early does not make its task run twice, and two runs are never more than one and a
    half intervals apart; in the long run they are one interval apart.
    """
    delay_s = interval_s - now_s % interval_s
    return delay_s if delay_s >= interval_s / 2 else delay_s + interval_s


async def next_tick(interval_s: float) -> None:
    """Sleeps until the next multiple of `interval_s` that is at least half an interval away."""
    await asyncio.sleep(delay_to_tick_s(asyncio.get_running_loop().time(), interval_s))

"""`Http2Options`: what an operator can choose about connections."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Http2Options:
    """Times in seconds; gRPC's names and meanings (gRFC A8 and A9).

    A client is pinged when nothing came from it for `keepalive_time_s`, and given up when nothing comes for
    `keepalive_timeout_s` after that; without open streams only with `keepalive_permit_without_calls`, and at most
    `max_pings_without_data` times (0: unlimited) until something is sent to it. A client that itself pings more often
    than every `min_ping_interval_s` is sent away after `max_ping_strikes` (0: never) warnings it does not see. After
    `max_age_s` (0: unlimited) a connection takes no new streams, and after `max_age_grace_s` (0: unlimited) more it is
    closed.
    """

    keepalive_time_s: float = 7200.0
    keepalive_timeout_s: float = 20.0
    keepalive_permit_without_calls: bool = False
    max_pings_without_data: int = 2
    min_ping_interval_s: float = 300.0
    max_ping_strikes: int = 2
    max_age_s: float = 0.0
    max_age_grace_s: float = 0.0

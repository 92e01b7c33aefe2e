"""`Http2Options`: the options of connections."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Http2Options:
    """Times in seconds; gRPC's names and meanings (gRFC A8 and A9).

    The server pings a client that has sent nothing for `keepalive_time_s`, and closes the connection if nothing arrives in
    the following `keepalive_timeout_s`. Without open streams it pings only with `keepalive_permit_without_calls`, and at
    most `max_pings_without_data` times (0: unlimited) until it sends data again. The connection of a client that pings
    more often than every `min_ping_interval_s` ends after `max_ping_strikes` (0: unlimited) such pings. After `max_age_s`
    (0: unlimited) a connection takes no new streams, and after `max_age_grace_s` (0: unlimited) more it is closed.
    """

    keepalive_time_s: float = 7200.0
    keepalive_timeout_s: float = 20.0
    keepalive_permit_without_calls: bool = False
    max_pings_without_data: int = 2
    min_ping_interval_s: float = 300.0
    max_ping_strikes: int = 2
    max_age_s: float = 0.0
    max_age_grace_s: float = 0.0

"""`ClientLoad`: whether the load generator itself, and not the server, was the limit.

Figures of a client that can't keep up are figures of the client. So it measures its own event loop: the share of a
processor that it uses, how late its timers are, and, in an open loop, how late it sends.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import psutil

from weir.perf.measurement.distribution import Distribution
from weir.runtime.loop_lag import LoopLag

MAX_CPU_SHARE = 0.85
"""A loop that uses more of a processor has no room for more requests."""

MIN_LAG_S = 0.002
LAG_SHARE = 0.2
"""Lag, and lateness of sending, count as a limit where they exceed both `MIN_LAG_S` and this share of the latency."""

BUSY_MACHINE = 0.95


@dataclass(frozen=True)
class ClientReading:
    """The client's own condition during a level of load.

    `loop_cpu` is the share of one processor that the event loop's thread used, `process_cpu` that of the whole process
    (it may be above 1), `machine_cpu` the busy share of all processors of this machine. `lag_p90_s` is how late the
    event loop's timers were.
    """

    loop_cpu: float
    process_cpu: float
    machine_cpu: float
    lag_p90_s: float


class ClientLoad(LoopLag):
    """Measures the running event loop from its creation to `stop_reading`."""

    def __init__(self) -> None:
        super().__init__()
        self._lags = Distribution()
        self._began_s = time.perf_counter()
        self._thread_s, self._process_s = time.thread_time(), time.process_time()
        psutil.cpu_percent()  # begins the interval
        self.start(asyncio.get_running_loop())

    def record(self, lag_s: float) -> None:
        """Counts how late one timer was."""
        super().record(lag_s)
        self._lags.add(lag_s)

    def stop_reading(self) -> ClientReading:
        """Ends the measurement."""
        self.stop()
        seconds = max(1e-9, time.perf_counter() - self._began_s)
        return ClientReading(
            loop_cpu=(time.thread_time() - self._thread_s) / seconds,
            process_cpu=(time.process_time() - self._process_s) / seconds,
            machine_cpu=psutil.cpu_percent() / 100,
            lag_p90_s=self._lags.quantile_s(0.9),
        )


def client_limits(reading: ClientReading, latency_p50_s: float, send_delay_p99_s: float) -> list[str]:
    """Why the client was the limit, one line each; none if it kept up.

    `send_delay_p99_s` is how late requests of an open loop were sent although nothing but the client delayed them.
    """
    limits = []
    if reading.loop_cpu >= MAX_CPU_SHARE:
        limits.append(f"its event loop used {reading.loop_cpu:.0%} of a processor")
    significant_s = max(MIN_LAG_S, LAG_SHARE * latency_p50_s)
    if reading.lag_p90_s >= significant_s:
        limits.append(f"its event loop was late by {reading.lag_p90_s * 1e3:.1f} ms (p90)")
    if send_delay_p99_s >= significant_s:
        limits.append(f"requests were sent {send_delay_p99_s * 1e3:.1f} ms after they were due (p99)")
    return limits

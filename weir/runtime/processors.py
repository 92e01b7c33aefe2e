"""The processors that this process may use: how many (`processor_count`), and which (`processors_by_core`).

`finish_before_woken` sets the scheduling policy that Linux recommends for throughput. A request passes four processes, and
each wakes the next one. By default the woken process may interrupt the one that has woken it, in the middle of its work:
the first request of a burst then travels on alone, and so do its followers. With SCHED_BATCH the process first finishes
what it has to do, and more requests share a frame and a batch.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst (`cpu.max`), scheduler/sched-bwc.rst (`cpu.cfs_quota_us`) and
cputopology.rst; sched(7), SCHED_BATCH.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from weir.runtime.control_groups import CGROUPS, OWN_CGROUPS, limits_of

_TOPOLOGY = Path("/sys/devices/system/cpu")


def processor_count(cgroups: Path = CGROUPS, own_cgroups: Path = OWN_CGROUPS) -> int:
    """The least of the processors in this process's affinity mask and the quotas of its control groups; at least 1.

    A quota of 3.5 processors counts as 3: what runs on a fourth would be throttled.
    """
    counts = [float(len(os.sched_getaffinity(0)))]
    quotas = limits_of("cpu", ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"), cgroups, own_cgroups)
    for texts in quotas:
        quota, period = (*" ".join(texts).split(), "", "")[:2]
        # "max", or -1 in version 1, is no limit.
        if quota.isdigit() and period.isdigit() and int(period):
            counts.append(int(quota) / int(period))
    return max(1, int(min(counts)))


def finish_before_woken() -> None:
    """Lets no thread that is woken interrupt a running one: sets SCHED_BATCH for this thread and what it starts.

    Does nothing where another policy than Linux's default is set, as by `chrt`, or where the system does not permit it.
    """
    with contextlib.suppress(OSError, AttributeError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def processors_by_core(topology: Path = _TOPOLOGY) -> list[int]:
    """The numbers of the processors in this process's affinity mask; those of one socket and of one core are neighbours."""
    return sorted(os.sched_getaffinity(0), key=lambda number: (*_place(topology, number), number))


def _place(topology: Path, number: int) -> tuple[int, int]:
    folder = topology / f"cpu{number}" / "topology"
    try:
        return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text())
    except (OSError, ValueError):
        return 0, number  # unknown: in the order of the numbers

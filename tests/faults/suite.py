"""All faults by their ids."""

from __future__ import annotations

from tests.faults.cases import clock, duplicates, kills, limits, links, mix, operators, partitions, remote_links
from tests.faults.cases import kills as pauses
from tests.faults.cases import models as bad_models
from tests.faults.scene import Fault

FAULTS: dict[str, Fault] = {
    "F-01": kills.worker,
    "F-02": kills.scheduler,
    "F-03": kills.gateway,
    "F-04": kills.broker,
    "F-05": kills.lazy_broker,
    "F-06": kills.everything,
    "F-07": pauses.rolling_restart,
    "F-08": pauses.zombie_worker,
    "F-09": pauses.pauses,
    "F-10": duplicates.duplicate_delivery,
    "F-11": duplicates.duplicate_publish,
    "F-12": bad_models.poison,
    "F-13": bad_models.poison_in_batch,
    "F-14": bad_models.hung,
    "F-15": bad_models.out_of_memory,
    "F-16": bad_models.bad_loads,
    "F-18": limits.full_queues,
    "F-19": limits.oversize,
    "F-20": limits.slow_consumer,
    "F-21": partitions.network,
    "F-22": partitions.long_partition,
    "F-23": clock.jumps,
    "F-26": operators.changed_streams,
    "F-28": operators.killed_parent,
    "F-29": operators.bad_starts,
    "F-30": mix.random_mix,
    "F-31": links.links,
    "F-32": remote_links.remote_links,
}

"""What `weir top` shows of one model: its versions, queues, workers, and why some of it does not run. Sans-IO."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from weir.cluster.rates import NO_RATES, Key, Rates
from weir.cluster.status.snapshot import ClusterStatus, ModelStatus, QueueStatus
from weir.commands.terminal import one_line
from weir.commands.top.rows import cut_name, duration_text, number_text, share_text
from weir.schemas.core.names import model_identity

_LANES = ("live", "event", "batch")
_MAX_CALLERS = 10


def detail_lines(key: str, rates: Mapping[Key, Rates], status: ClusterStatus | None, width: int) -> list[str]:
    """The facts about the model with identity `key`, as lines of at most `width` characters."""
    model = None
    queues: list[QueueStatus] = []
    if status is not None:
        model = next((each for each in status.models if model_identity(each.name, each.namespace) == key), None)
        queues = [each for each in status.queues if model_identity(each.model, each.namespace) == key]
    lines = [*_versions(key, rates, model), "", *_queues(queues)]
    callers = _callers(queues)
    if callers:
        lines += ["", *callers]
    if model is not None:
        lines += ["", *_workers(model)]
        lines += [f"  {one_line(reason)}" for reason in (*model.reasons, *model.rejected)]
    return [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]


def _versions(key: str, rates: Mapping[Key, Rates], model: ModelStatus | None) -> list[str]:
    form = "{:>7} {:<11} {:>6} {:>5} {:>4} {:>4} {:>6} {:>6} {:>6} {:>6} {:>5}"
    titles = ("VERSION", "STATE", "SHARE", "INST", "BUSY", "WRK", "REQ/S", "FAIL/S", "P50", "P99", "BATCH")
    lines = [form.format(*titles)]
    listed = {} if model is None else {version.version: version for version in model.versions}
    for number in sorted({*listed, *(version for name, version in rates if name == key)}):
        version, rate = listed.get(number), rates.get((key, number), NO_RATES)
        state = ("", "", "", "", "")
        if version is not None:
            counts = str(version.instances), str(version.busy), str(version.workers)
            state = (version.state, share_text(version.share), *counts)
        lines.append(
            form.format(
                number,
                *state,
                number_text(rate.requests_per_s),
                number_text(rate.failures_per_s or None),
                duration_text(rate.p50_ms),
                duration_text(rate.p99_ms),
                number_text(rate.batch_size, 5),
            ).rstrip()
        )
        if version is not None:
            lines += [f"        {one_line(reason)}" for reason in version.reasons]
    return lines


def _queues(queues: list[QueueStatus]) -> list[str]:
    form = "{:>9} {:<30} {:>6} {:>6} {:>6} {:>6} {:>7}"
    lines = [form.format("PARTITION", "OWNER", "LIVE", "EVENT", "BATCH", "OLDEST", "FRAMES")]
    for queue in queues:
        depths = [number_text(queue.lanes[lane].depth) if lane in queue.lanes else "?" for lane in _LANES]
        oldest_s = max((lane.oldest_s for lane in queue.lanes.values()), default=0.0)
        owner = cut_name(one_line(queue.owner) or "none", 30)
        oldest = duration_text(oldest_s * 1000) if oldest_s else ""
        lines.append(form.format(queue.partition, owner, *depths, oldest, number_text(queue.frames, 7)))
    return lines


def _callers(queues: list[QueueStatus]) -> list[str]:
    """Who has how many requests in flight, over all partitions, those with most first; none without an access policy."""
    in_flight, refused = Counter[str](), Counter[str]()
    for caller in (caller for queue in queues for caller in queue.callers):
        in_flight[caller.name] += caller.in_flight
        refused[caller.name] += caller.refused
    if not in_flight:
        return []
    form = "{:<30} {:>9} {:>7}"
    rows = sorted(in_flight, key=lambda name: (-in_flight[name], -refused[name], name))[:_MAX_CALLERS]
    return [
        form.format("CALLER", "IN FLIGHT", "REFUSED"),
        *(form.format(cut_name(one_line(name), 30), in_flight[name], refused[name]) for name in rows),
    ]


def _workers(model: ModelStatus) -> list[str]:
    needs = "" if model.desired_workers is None else f", its load needs {model.desired_workers}"
    return [f"{len(model.workers)} workers{needs}", *(f"  {one_line(worker)}" for worker in model.workers)]

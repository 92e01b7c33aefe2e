"""Text output of `weir status`: problems first, then the broker, the processes, models and queues.

The output fits 100 columns, and is plain text if the standard output is not a terminal.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from weir.cluster.status.problems import BUSY
from weir.cluster.status.snapshot import (
    Broker,
    ClusterStatus,
    Finding,
    Host,
    Level,
    ModelStatus,
    Problem,
    QueueStatus,
    RoleStatus,
)
from weir.commands.terminal import one_line

WIDTH = 100
"""Width in columns if the output is not a terminal."""

MAX_REASON_LENGTH = 320
"""Length in characters at which a problem or reason is cut without `--all`; JSON has the full text."""

ROWS = 40
"""Number of models, queues and processes shown without `--all`; the busiest are chosen."""

_FIRST_EPOCH_MS = 1_000_000_000_000
"""Smaller epochs are not timestamps: the scheduler's clock was not set."""

_STYLES = {
    "healthy": "bold green",
    "degraded": "bold yellow",
    "down": "bold red",
    "unreachable": "bold red",
    "up": "green",
    "READY": "green",
    "silent": "red",
    "UNAVAILABLE": "red",
}


_LEVEL_STYLES: dict[Level, str] = {"down": "bold red", "warning": "yellow", "note": "dim"}


def print_status(status: ClusterStatus, console: Console | None = None, shows_all: bool = False) -> None:
    """Print `status` to `console`, or to the standard output."""
    chosen = console or own_console()
    if chosen.is_terminal:
        chosen.print(rendered(status, shows_all))
        return
    with chosen.capture() as captured:
        chosen.print(rendered(status, shows_all))
    for line in captured.get().splitlines():
        print(line.rstrip(), file=chosen.file)


def own_console() -> Console:
    """A console on the standard output, `WIDTH` columns wide if that is not a terminal."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(width=WIDTH, highlight=False, markup=False)


def rendered(status: ClusterStatus, shows_all: bool = False) -> RenderableType:
    """Build the whole output for `status`; with `shows_all` without limits on rows and lengths."""
    return Group(*_parts(status, None if shows_all else ROWS))


def _parts(status: ClusterStatus, rows: int | None) -> Iterator[RenderableType]:
    yield _headline(status)
    if status.error:
        yield Text(status.error)
    if status.problems:
        yield Text()
        yield from _problems(status, shows_all=rows is None)
    if status.broker is None:
        return
    yield Text()
    yield from _broker(status.broker, rows is None)
    if status.roles:
        yield Text()
        hosts = {host.id: host for host in status.hosts}
        yield from _cut(_roles(status.roles[:rows], hosts, status.taken_ms), len(status.roles), rows)
    if status.models:
        yield Text()
        # If not all models are shown, those without workers and the busiest come first.
        models = sorted(
            status.models, key=lambda model: (bool(model.workers or model.scaled_to_zero), -_busy(model), model.name)
        )[:rows]
        chosen = sorted(models, key=lambda model: (model.name, model.namespace))
        yield from _cut(_models(chosen, shows_all=rows is None), len(status.models), rows)
    if status.queues or status.durable:
        yield Text()
        queues = sorted(status.queues, key=lambda queue: (bool(queue.owner), -queue.frames, queue.model))[:rows]
        chosen_queues = sorted(queues, key=lambda queue: (queue.model, queue.namespace, queue.partition))
        yield from _cut(_queues(chosen_queues, status), len(status.queues), rows)


def _headline(status: ClusterStatus) -> Text:
    counts = [
        _count(len(status.hosts), "host"),
        *(
            _count(sum(r.role == role and r.state != "silent" for r in status.roles), role)
            for role in ("gateway", "scheduler", "worker")
        ),
        _count(len(status.models), "model"),
        _count(len(status.queues), "queue"),
    ]
    line = Text(status.state, style=_STYLES[status.state])
    if status.broker is not None:
        line.append(": " + ", ".join(counts) + _used(status.hosts), style="not bold default")
    return line


def _used(hosts: Sequence[Host]) -> str:
    """The utilization of the instances of all hosts."""
    instances = sum(host.instances for host in hosts)
    busy = sum((host.utilization or 0.0) * host.instances for host in hosts)
    return f"; instances {busy / instances:.0%} busy" if instances else ""


_COMMAND = "`weir "
"""In a piece of advice that a person follows by typing."""


def _problems(status: ClusterStatus, shows_all: bool) -> Iterator[RenderableType]:
    """One line for each finding, with long texts cut; with `shows_all` one for each problem."""
    shown: Sequence[Problem | Finding] = status.problems if shows_all else status.findings
    for problem in shown:
        line = Table.grid(padding=(0, 1, 0, 0))
        text = problem.text if shows_all else _cut_text(problem.text)
        if isinstance(problem, Finding) and problem.texts:
            text += " (--all)"
        style = _LEVEL_STYLES[problem.level]
        line.add_row(Text("-" if problem.level == "note" else "!", style=style), one_line(text))
        if _COMMAND in problem.advice:
            line.add_row("", Text(problem.advice.replace("`", ""), style="dim"))
        yield line


def _broker(broker: Broker, shows_all: bool) -> Iterator[RenderableType]:
    text = [f"nats-server {broker.version} at {one_line(broker.url)}"]
    if broker.cluster:
        servers = ", ".join(f"{server.name} {server.state}" for server in broker.servers)
        text.append(f"cluster {broker.cluster}: {servers}")
    text.append(f"ack = fsync: {broker.durability}")
    yield Text(one_line("; ".join(text)))
    table = _table("STREAM", "STORAGE", "-MESSAGES", "-BYTES", "-OF", "-COPIES", "STATE")
    for stream in broker.streams:
        state = f"behind: {', '.join(stream.behind)}" if stream.behind else ""
        if broker.cluster and not stream.leader:
            state = "no leader"
        # Buckets and object stores are shown only if something is wrong with them.
        if not (shows_all or state) and stream.name.startswith(("KV_", "OBJ_")):
            continue
        limit = _size(stream.max_bytes) if stream.max_bytes > 0 else ""
        size = _size(stream.bytes)
        row = (stream.name, stream.storage, f"{stream.messages:,}", size, limit, str(stream.replicas), state)
        table.add_row(*map(one_line, row))
    yield table


def _roles(roles: Sequence[RoleStatus], hosts: Mapping[str, Host], now_ms: int) -> Table:
    """One row per host, followed by one row for each of its processes."""
    releases = {role.release for role in roles if role.state != "silent"}
    table = _table("ROLE", "ID", "-PID", "-UP", "STATE", "LOAD", *(("RELEASE",) if len(releases) > 1 else ()))
    for host, of_host in groupby(roles, key=lambda role: role.host):
        processes = list(of_host)
        name = next((role.host_name for role in processes if role.host_name), "")
        # Hosts may share a name, as containers do; their ids distinguish them.
        title = Text(one_line(f"{name} ({host})" if name else host), style="bold")
        table.add_row("host", title, "", "", "", _host_load(hosts.get(host)))
        for role in processes:
            since = _age((now_ms - role.since_ms) / 1000) if role.since_ms else ""
            state = Text(role.state, style=_STYLES.get(role.state, "yellow"))
            cells = f" {role.role}", one_line(role.id), str(role.pid), since
            table.add_row(
                *cells, state, one_line(_role_load(role)), *((one_line(role.release),) if len(releases) > 1 else ())
            )
    return table


def _role_load(role: RoleStatus) -> str:
    if role.role in ("gateway", "console"):
        return " ".join(url for url in role.urls if not url.endswith("/metrics"))
    if role.role == "durable":
        return ""
    if role.role == "scheduler":
        return _count(role.queues, "queue")
    text = f"{_count(role.models, 'model')}, {_count(role.instances, 'instance')}"
    if role.state == "silent" or role.utilization is None:
        return text
    return f"{_count(role.models, 'model')}; {role.busy} of {role.instances} busy, {role.utilization:.0%}"


def _host_load(host: Host | None) -> Text:
    if host is None or host.utilization is None:
        return Text()
    text = f"{host.busy} of {_count(host.instances, 'instance')} busy, {host.utilization:.0%}"
    return Text(text, style="yellow" if host.utilization >= BUSY else "")


def _models(models: Sequence[ModelStatus], shows_all: bool) -> Table:
    """One row per model version; the first row of a model has its utilization and desired number of workers."""

    def reason(reasons: Sequence[str]) -> str:
        text = "; ".join(reasons)
        return one_line(text if shows_all else _cut_text(text))

    splits = any(version.share is not None for model in models for version in model.versions)
    shares = ["-SHARE"] if splits else []
    table = _table("MODEL", "VERSION", "STATE", *shares, "-INSTANCES", "-BUSY", "-USED", "-WORKERS", "-NEEDS", "REASON")
    for model in models:
        name = _name(model.name, model.namespace)
        used = Text("" if model.utilization is None else f"{model.utilization:.0%}")
        needs = Text("" if model.desired_workers is None else str(model.desired_workers))
        if (model.utilization or 0.0) >= BUSY:
            used.stylize("yellow")
        if (model.desired_workers or 0) > len(model.workers):
            needs.stylize("yellow")
        if not model.versions:
            state = Text("no worker" if not model.reasons else "UNAVAILABLE", style="red")
            if model.scaled_to_zero:
                state = Text("scaled to zero", style="dim")
            table.add_row(name, "", state, *([""] * splits), "", "", "", "0", needs, reason(model.reasons))
        for version in model.versions:
            state = Text(version.state, style=_STYLES.get(version.state, "yellow"))
            counts = str(version.instances), str(version.busy), used, str(version.workers), needs
            share = ["" if version.share is None else f"{version.share:.1%}"] * splits
            table.add_row(name, str(version.version), state, *share, *counts, reason(version.reasons))
            name, used, needs = "", Text(), Text()
    return table


def _queues(queues: Sequence[QueueStatus], status: ClusterStatus) -> Table:
    durable: dict[tuple[str, str], int] = {}
    for one in status.durable:
        durable[one.model, one.namespace] = durable.get((one.model, one.namespace), 0) + one.waiting + one.taken
    table = _table("QUEUE", "OWNER", "-SINCE", "-LIVE", "-EVENT", "-BATCH", "-OLDEST", "-FRAMES", "-DURABLE")
    for queue in queues:
        name = _name(queue.model, queue.namespace) + (f" /{queue.partition}" if queue.partition else "")
        owner = Text(one_line(queue.owner)) if queue.owner else Text("none", style="red")
        if len(queue.claims) > 1:
            owner.append(f" +{len(queue.claims) - 1}", style="red")
        depths = [str(queue.lanes[lane].depth) if lane in queue.lanes else "?" for lane in ("live", "event", "batch")]
        oldest_s = max((lane.oldest_s for lane in queue.lanes.values()), default=0.0)
        left = durable.get((queue.model, queue.namespace), 0) if not queue.partition else 0
        oldest = _age(oldest_s) if oldest_s else ""
        table.add_row(
            name, owner, _owned_for(queue.epoch, status.taken_ms), *depths, oldest, f"{queue.frames:,}", f"{left:,}"
        )
    return table


def _owned_for(epoch: int, now_ms: int) -> str:
    """The age of a queue's ownership: its epoch is about the unix time in ms at which the owner acquired the queue."""
    return _age(max(0, now_ms - epoch) / 1000) if epoch >= _FIRST_EPOCH_MS else ""


def _cut_text(text: str) -> str:
    return text if len(text) <= MAX_REASON_LENGTH else f"{text[:MAX_REASON_LENGTH]}... (--all)"


def _cut(table: Table, count: int, rows: int | None) -> Iterator[RenderableType]:
    yield table
    if rows is not None and count > rows:
        yield Text(f"and {count - rows} more: see --all")


def _table(*titles: str) -> Table:
    """A table without lines; a title with a leading dash marks a column of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in titles:
        is_number = title.startswith("-")
        is_text = title in ("REASON", "LOAD", "HOST", "MODEL", "QUEUE") or (title == "STATE" and title is titles[-1])
        table.add_column(
            title.removeprefix("-"),
            justify="right" if is_number else "left",
            no_wrap=not is_text,
            overflow="fold" if is_text else "ellipsis",
        )
    return table


def _busy(model: ModelStatus) -> int:
    return sum(version.busy for version in model.versions)


def _name(name: str, namespace: str) -> str:
    return one_line(f"{name} ({namespace})" if namespace else name)


def _count(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def _age(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 86400:
        return str(datetime.timedelta(seconds=round(seconds)))
    return f"{seconds / 86400:.0f} d"


def _size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"

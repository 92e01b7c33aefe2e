"""The output of `weir batch`: a table of jobs, the details of one job, and the progress of a running job."""

from __future__ import annotations

import datetime
import shlex
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.table import Table

from weir.commands.batch_jobs.batch_client import JobsClient, Unreachable
from weir.commands.terminal import print_json

FINAL = ("succeeded", "failed", "cancelled")

ALL_SUCCEEDED, JOB_ENDED_BADLY, ITEMS_FAILED = 0, 1, 3
"""Exit statuses by the outcome of the job and of its items."""

_POLL_S = 0.5
_WATCH_TIMEOUT_S = 3.0
_LINES_EVERY_S = 10.0
_WIDTHS = 0, 38, 52, 64, 80  # terminal widths from which one more field fits
_STYLES = {"succeeded": "green", "failed": "red", "cancelled": "yellow", "paused": "yellow", "running": "cyan"}


def exit_status(job: dict[str, Any]) -> int:
    """The exit status for a job that has ended."""
    if job["state"] != "succeeded":
        return JOB_ENDED_BADLY
    return ITEMS_FAILED if job["failed"] else ALL_SUCCEEDED


def show_table(jobs: list[dict[str, Any]]) -> None:
    """Print one line per job."""
    console = Console()
    if not jobs:
        console.print("no jobs")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("ID", "MODEL", "STATE"):
        table.add_column(title, no_wrap=True)
    for title in ("ITEMS", "FAILED", "RATE", "LEFT", "CREATED"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("OUTPUT", overflow="fold")
    for job in jobs:
        table.add_row(
            job["id"],
            job["model"],
            _styled(job["state"]),
            _items(job),
            _number(job["failed"]),
            _rate(job) if job["state"] == "running" else "",
            _left(job),
            _moment(job["created_ms"]),
            job["output"],
        )
    # Piped output and narrow terminals get whole lines instead of folded cells, so that ids can be copied.
    wide = Console(width=max(500, console.width), force_terminal=console.is_terminal, no_color=console.no_color)
    fits = console.is_terminal and wide.measure(table).maximum <= console.width
    (console if fits else wide).print(table, soft_wrap=True, crop=False)


def show_job(job: dict[str, Any], as_json: bool) -> None:
    """Print the details of a job."""
    console = Console(highlight=False, soft_wrap=True)
    if as_json:
        print_json(job)
        return
    inputs = job["input"]
    rows = {
        "id": job["id"],
        "model": job["model"] + (f", version {job['version']}" if job["version"] else ""),
        "state": _styled(job["state"]),
        "items": _items(job),
        "failed": _number(job["failed"]),
        "rate": _rate(job) if job["rate_per_s"] else "",
        "left": _left(job),
        "input": inputs[0] + (f" and {len(inputs) - 1} more" if len(inputs) > 1 else "") if inputs else "",
        "output": job["output"],
        "created": _moment(job["created_ms"]),
        "started": _moment(job["started_ms"]),
        "ended": _moment(job["ended_ms"]),
        "gateway": job["owner"],
        "waits": job["note"],
        "error": job["error"],
    }
    for name, value in rows.items():
        if value:
            console.print(f"{name:9}", end="")
            console.print(value, markup=name == "state")


def watch(client: JobsClient, job: dict[str, Any]) -> dict[str, Any]:
    """Show the progress of a job until it ends and return its last status. An unreachable server is waited for."""
    console = Console(stderr=True, highlight=False)
    shown = _watch_bar(client, job, console) if console.is_terminal else _watch_lines(client, job)
    summary = f"{_items(shown)} items"
    if shown["failed"]:
        summary += f", {_number(shown['failed'])} failed"
    took_s = max(0, shown["ended_ms"] - shown["started_ms"]) / 1000 if shown["started_ms"] else 0.0
    if took_s and shown["state"] == "succeeded":
        summary += f", in {_duration(took_s)}" + (f" ({_speed(shown['done'] / took_s)})" if shown["done"] else "")
    # Not folded, so that paths and commands can be copied.
    console.print(f"job {shown['id']} {_styled(shown['state'])}: {summary}", soft_wrap=True)
    if shown["error"]:
        console.print(shown["error"], style="red", markup=False, soft_wrap=True)
    if shown["done"] or shown["state"] == "succeeded":
        console.print(f"output: {shown['output']}", markup=False, soft_wrap=True)
    if shown["failed"] and shown["output_format"] == "jsonl":
        console.print(
            f"failures: grep '\"error\":' {shlex.quote(shown['output'])}/part-*", markup=False, soft_wrap=True
        )
    if shown["failed"] or shown["state"] == "cancelled" or (shown["state"] == "failed" and shown["total"] is not None):
        what = "retry the failed items" if shown["state"] == "succeeded" else "continue the job"
        console.print(f"{what} with: weir batch retry {shown['id']}{client.option}", markup=False, soft_wrap=True)
    return shown


def _watch_bar(client: JobsClient, job: dict[str, Any], console: Console) -> dict[str, Any]:
    columns: list[ProgressColumn] = [SpinnerColumn(finished_text=" "), BarColumn(bar_width=None), TaskProgressColumn()]
    fields = [
        TextColumn("{task.fields[items]}"),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[failed]}", style="red"),
        TextColumn("{task.fields[rate]}", style="cyan"),
        TextColumn("{task.description}"),
    ]
    # On a narrow terminal the least important fields are left out instead of cutting all of them.
    columns += fields[: sum(console.width >= width for width in _WIDTHS)]
    watched = _WatchedJob(client, job)
    with Progress(*columns, console=console, refresh_per_second=5, expand=True) as progress:
        task = progress.add_task(job["model"], total=None, items="", rate="", left="", failed="")
        shown_wait = ""
        while True:
            job = watched.job
            is_running = job["state"] == "running" and not watched.silent_s
            left = (f"{_left(job)} left" if _left(job) else "") if is_running else job["state"]
            progress.update(
                task,
                total=job["total"],
                completed=job["done"],
                items=_items(job).replace(" of ", "/"),
                rate=_rate(job) if is_running and job["rate_per_s"] else "",
                left=f"no response for {_duration(watched.silent_s)}" if watched.silent_s else left,
                failed=f"{_number(job['failed'])} failed" if job["failed"] else "",
            )
            if job["state"] in FINAL:
                return job
            waits_for = watched.problem or job["note"]
            if waits_for and waits_for != shown_wait:
                # Printed above the bar, where the whole text fits.
                progress.console.print(f"waiting: {waits_for}", style="yellow", markup=False, soft_wrap=True)
            shown_wait = waits_for
            watched.poll()


def _watch_lines(client: JobsClient, job: dict[str, Any]) -> dict[str, Any]:
    """Progress without a terminal: one line for each change of state, and one every `_LINES_EVERY_S`."""
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    watched = _WatchedJob(client, job)
    before, next_s = ("", "", False), 0.0
    while True:
        job = watched.job
        now = job["state"], job["note"] or before[1], bool(watched.problem)
        if now != before or time.monotonic() >= next_s:
            if watched.problem:
                parts = [f"waiting: {watched.problem} (no response for {_duration(watched.silent_s)})"]
            else:
                parts = [job["state"], f"{_items(job)} items", f"{_number(job['failed'])} failed"]
                parts += [_rate(job)] if job["rate_per_s"] else []
                parts += [f"{_left(job)} left"] if _left(job) else []
                parts += [job["note"]] if job["note"] else []
            console.print(f"{job['id']}: {', '.join(parts)}")
            before, next_s = now, time.monotonic() + _LINES_EVERY_S
        if job["state"] in FINAL:
            return job
        watched.poll()


class _WatchedJob:
    """A job's last known status, and for how long the server has not responded since.

    `problem` is why the last poll failed, "" if it succeeded; `silent_s` is the time since the last response then, else 0.
    """

    def __init__(self, client: JobsClient, job: dict[str, Any]) -> None:
        self.job = job
        self.problem = ""
        self.silent_s = 0.0
        self._client = client
        self._answered_s = time.monotonic()
        # Shorter than for other commands: the output does not change while a request waits.
        client.timeout_s = _WATCH_TIMEOUT_S

    def poll(self) -> None:
        """Wait `_POLL_S`, then poll the server. Raises StartError if it rejects the request, e.g. for an unknown job."""
        time.sleep(_POLL_S)
        try:
            self.job = self._client.status(self.job["id"])
        except Unreachable as error:
            self.problem, self.silent_s = str(error), time.monotonic() - self._answered_s
        else:
            self.problem, self.silent_s, self._answered_s = "", 0.0, time.monotonic()


def _styled(state: str) -> str:
    style = _STYLES.get(state)
    return f"[{style}]{state}[/{style}]" if style else state


def _items(job: dict[str, Any]) -> str:
    done, total = job["done"], job["total"]
    return _number(done) if total is None or done == total else f"{_number(done)} of {_number(total)}"


def _rate(job: dict[str, Any]) -> str:
    return _speed(job["rate_per_s"])


def _speed(rate: float) -> str:
    return f"{rate:,.0f}/s" if rate >= 100 else f"{rate:.3g}/s"


def _left(job: dict[str, Any]) -> str:
    left_s = job["left_s"]
    return "" if left_s is None or job["state"] != "running" else _duration(left_s)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return str(datetime.timedelta(seconds=round(seconds)))


def _number(count: int) -> str:
    return f"{count:,}"


def _moment(unix_ms: int) -> str:
    if not unix_ms:
        return ""
    return datetime.datetime.fromtimestamp(unix_ms / 1000).astimezone().strftime("%Y-%m-%d %H:%M:%S")

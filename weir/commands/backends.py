"""`weir backends`: lists the backends, what each can run on this machine, and why not the rest."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weir.commands.preflight import check_backend_directories

if TYPE_CHECKING:
    from weir.commands.doctor.backend_rows import BackendRow
    from weir.worker.devices.gpus import HostGpus

_PLAIN_WIDTH = 10_000
"""Width in columns if the output is not a terminal, so that lines are never wrapped."""


def backends(values: Mapping[str, Any]) -> None:
    """Print the backends of this machine, with those in the given backend directories. Raises StartError."""
    # Imported here because commands that start roles do not need it.
    from weir.commands.doctor.backend_rows import backend_rows
    from weir.worker.backends.registry import BackendRegistry
    from weir.worker.devices.gpus import find_gpus

    registry = BackendRegistry(backend_directories=check_backend_directories(values["backend_directory"]))
    gpus = find_gpus()
    rows = list(backend_rows(registry, gpus))
    print(as_json(rows, gpus) if values["json"] else as_text(rows, gpus, is_terminal=sys.stdout.isatty()))


def as_json(rows: Sequence[BackendRow], gpus: HostGpus) -> str:
    """`{"backends": [...], "gpus": [...], "gpus_problem": ""}`, with the fields of `BackendRow` and `Gpu`."""
    document = {
        "backends": [row._asdict() for row in rows],
        "gpus": [gpu._asdict() for gpu in gpus.gpus],
        "gpus_problem": gpus.problem,
    }
    return json.dumps(document, indent=2)


def as_text(rows: Sequence[BackendRow], gpus: HostGpus, is_terminal: bool) -> str:
    """A table of the backends and a list of the GPUs, fitted to the terminal if the output is one."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD if is_terminal else None, pad_edge=False)
    for title in ("backend", "version", "runs on", "formats", "what does not work here"):
        table.add_column(title, overflow="fold")
    for row in rows:
        cells = (row.name, row.version or "-", _devices(row), ", ".join(row.formats) or "-", "\n".join(row.problems))
        table.add_row(*map(Text, cells))
    target = io.StringIO()
    console = Console(
        file=target,
        width=None if is_terminal else _PLAIN_WIDTH,
        force_terminal=is_terminal,
        highlight=False,
        markup=False,
    )
    console.print(table)
    lines = [line.rstrip() for line in target.getvalue().splitlines()]
    return "\n".join([*lines, "", *_gpu_lines(gpus)])


def _devices(row: BackendRow) -> str:
    places = [*(["CPU"] if row.cpu else []), *(f"GPU {ordinal}" for ordinal in row.gpus)]
    return ", ".join(places) or "nothing"


def _gpu_lines(gpus: HostGpus) -> list[str]:
    if not gpus.gpus:
        return [f"no GPUs: {gpus.problem}"]
    return [
        f"GPU {gpu.ordinal}: {gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB, compute capability "
        f"{'.'.join(map(str, gpu.compute_capability))}, {gpu.uuid}"
        for gpu in gpus.gpus
    ]

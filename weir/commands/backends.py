"""`weir backends`: lists the backends, what each can run on this machine, and why not the rest."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from weir.commands.preflight import check_backend_directories

if TYPE_CHECKING:
    from worker.backend_api.interface import Availability
    from worker.backends.registry import BackendRegistry
    from worker.devices.gpus import HostGpus

HELP = "List the backends, what each can run on this machine, and why not the rest."

_PLAIN_WIDTH = 10_000
"""Width in columns if the output is not a terminal, so that lines are never wrapped."""


class BackendRow(NamedTuple):
    """One backend. `gpus` are the ordinals it can use; `problems` describe what does not work here and the remedy.

    `file` is the path of a custom backend, "" for a built-in one.
    """

    name: str
    version: str
    cpu: bool
    gpus: Sequence[int]
    formats: Sequence[str]
    problems: Sequence[str]
    file: str = ""


def backends(values: Mapping[str, Any]) -> None:
    """Print the backends of this machine, with those in the given backend directories. Raises StartError."""
    # Imported here because commands that start roles do not need it.
    from worker.backends.registry import BackendRegistry
    from worker.devices.gpus import find_gpus

    registry = BackendRegistry(backend_directories=check_backend_directories(values["backend_directory"]))
    gpus = find_gpus()
    rows = list(backend_rows(registry, gpus))
    print(as_json(rows, gpus) if values["json"] else as_text(rows, gpus, is_terminal=sys.stdout.isatty()))


def backend_rows(registry: BackendRegistry, gpus: HostGpus) -> Iterator[BackendRow]:
    """The built-in backends, then those of the backend directories."""
    from schemas.core.errors import WeirError
    from worker.backend_api.interface import Availability
    from worker.backends.registry import BACKENDS, built_in
    from worker.devices.gpus import WorkerDevices

    ordinals = tuple(gpu.ordinal for gpu in gpus.gpus)
    devices = WorkerDevices(ordinals, ordinals)
    for name in BACKENDS:
        try:
            available = built_in(name).availability(devices)
        except WeirError as error:
            available = Availability((), problems=(error.message.removeprefix(f"backend '{name}' can't run here: "),))
        yield _row(name, available, gpus)
    for found in registry.in_directories():
        if found.backend is None:
            available = Availability((), problems=(found.problem,))
        else:
            available = found.backend.availability(devices)
        yield _row(found.name, available, gpus, str(found.file))


def _row(name: str, available: Availability, gpus: HostGpus, file: str = "") -> BackendRow:
    can_gpu = "KIND_GPU" in available.runs_on
    problems = list(available.problems)
    if available.runs_on and not gpus.gpus and not any("GPU" in problem for problem in problems):
        problems.append(f"not on GPUs: {gpus.problem}")
    return BackendRow(
        name,
        available.version,
        "KIND_CPU" in available.runs_on,
        [gpu.ordinal for gpu in gpus.gpus] if can_gpu else [],
        available.formats,
        problems,
        file,
    )


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

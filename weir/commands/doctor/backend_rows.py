"""`backend_rows`: what each backend can run on this machine, and why not the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from weir.schemas.core.errors import WeirError
from weir.worker.backend_api.interface import Availability
from weir.worker.backends.registry import BACKENDS, BackendRegistry, built_in
from weir.worker.devices.gpus import HostGpus, WorkerDevices


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


def backend_rows(registry: BackendRegistry, gpus: HostGpus) -> Iterator[BackendRow]:
    """The built-in backends, then those of the backend directories."""
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

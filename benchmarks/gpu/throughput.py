"""Sections of served networks: beside the bare engine, with options on and off, and two networks side by side."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import weir
from benchmarks.gpu.bare_loops import STEPS, bare_p50_ms, bare_rate
from benchmarks.gpu.clients import Load, Utilization, loaded
from benchmarks.gpu.networks import Network, network, write_files, write_model
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.report import Section

MODULES = {"pytorch": "torch", "onnxruntime": "onnxruntime", "tensorrt": "tensorrt"}

RATIO, MORE_MS = 0.95, 0.6
"""Aimed at: the share of the bare engine's rate from batch 8 on, and the time that a single request may take longer."""


def usable(plan: Plan, section: Section) -> list[str]:
    """The backends of the plan that are installed, and can run on its device."""
    found: list[str] = []
    for backend in plan.backends:
        if importlib.util.find_spec(MODULES[backend]) is None:
            section.note(f"{backend} is left out: the module {MODULES[backend]} is not installed.")
        elif backend == "tensorrt" and not plan.on_gpu:
            section.note("tensorrt is left out: it needs a GPU.")
        else:
            found.append(backend)
    return found


def serve(models: Path, **options: Any) -> weir.Server:
    """A server of these models, which takes clients' shared memory."""
    return weir.Server(models, start_timeout_s=300, allow_client_shm=True, **options)


def throughput(plan: Plan) -> Section:
    """Every network, backend, number of instances and batch, served and bare in turn."""
    section = Section(
        "throughput",
        "Served networks beside the bare engine",
        f"Rows a second, and the median time of one request at a time. Clients on the same host send batches in "
        f"shared memory. "
        f"Aimed at: {RATIO} of the bare rate from batch 8 on, and at most {MORE_MS} ms more for one request.",
        (
            "network",
            "backend",
            "instances",
            "batch",
            "bare/s",
            "served/s",
            "ratio",
            "bare p50 ms",
            "served p50 ms",
            "GPU",
        ),
    )
    backends = usable(plan, section)
    for name in plan.networks:
        chosen = network(name, plan)
        folder = plan.folder / "throughput" / name
        files = write_files(chosen, folder, set(backends), max(plan.batches))
        for backend in backends:
            for count in plan.instances:
                write_model(
                    folder / "models",
                    f"{backend}_{count}",
                    backend,
                    files[backend],
                    chosen,
                    batch=max(plan.batches),
                    count=count,
                    kind=plan.kind,
                )
        with serve(folder / "models") as server:
            for backend in backends:
                for count in plan.instances:
                    for batch in plan.batches:
                        if not plan.has_time:
                            section.note("The time was over before all rows were measured.")
                            return section
                        _row(section, plan, server, chosen, backend, files[backend], count, batch)
    return section


def _row(
    section: Section,
    plan: Plan,
    server: weir.Server,
    chosen: Network,
    backend: str,
    file: Path,
    count: int,
    batch: int,
) -> None:
    rows, model = chosen.rows(batch), f"{backend}_{count}"
    steps = STEPS[backend](file, rows, plan.on_gpu)
    bare = bare_rate(steps, count, batch, plan.seconds)
    bare_ms = bare_p50_ms(steps, plan.seconds / 2)
    with Utilization(plan.on_gpu) as used:
        served = loaded(server.grpc_url, model, rows, 2 * count + 1, plan.seconds).rate
    served_ms = loaded(server.grpc_url, model, rows, 1, plan.seconds / 2).p50_ms
    section.add(
        chosen.name, backend, count, batch, f"{bare:.0f}", f"{served:.0f}", served / bare, bare_ms, served_ms, str(used)
    )


SWITCHES: Sequence[tuple[str, str]] = (
    ("all defaults", ""),
    ("CUDA graphs", "cuda { graphs: true }"),
    ("output copy stream", "cuda { output_copy_stream: true }"),
    ("busy waiting", "cuda { busy_wait_events: true }"),
    ("graphs, copy stream, busy waiting", "cuda { graphs: true output_copy_stream: true busy_wait_events: true }"),
    ("no pinned memory", "input_pinned_memory { enable: false } output_pinned_memory { enable: false }"),
)
"""What is measured, and the field `optimization` of its configuration."""


def switches(plan: Plan) -> Section:
    """One network with each of the options of `optimization`."""
    section = Section(
        "switches",
        "CUDA graphs, pinned memory and the stream for copies of outputs",
        "The encoder with 128 tokens and the residual network in PyTorch, one instance, with each option of "
        "`optimization`.",
        ("network", "batch", "option", "served/s", "p50 ms", "GPU"),
    )
    for name in ("encoder128", "residual"):
        chosen = network(name, plan)
        folder = plan.folder / "switches" / name
        file = write_files(chosen, folder, {"pytorch"}, max(plan.batches))["pytorch"]
        for number, (_, option) in enumerate(SWITCHES):
            more = f"optimization {{ {option} }}" if option else ""
            fields = {"batch": max(plan.batches), "count": 1, "kind": plan.kind, "more": more}
            write_model(folder / "models", f"option_{number}", "pytorch", file, chosen, **fields)
        with serve(folder / "models") as server:
            for batch in (plan.batches[0], plan.batches[-1]):
                rows = chosen.rows(batch)
                for number, (title, _) in enumerate(SWITCHES):
                    if not plan.has_time:
                        section.note("The time was over before all rows were measured.")
                        return section
                    model = f"option_{number}"
                    with Utilization(plan.on_gpu) as used:
                        rate = loaded(server.grpc_url, model, rows, 3, plan.seconds).rate
                    p50_ms = loaded(server.grpc_url, model, rows, 1, plan.seconds / 2).p50_ms
                    section.add(name, batch, title, f"{rate:.0f}", p50_ms, str(used))
    return section


def side_by_side(plan: Plan) -> Section:
    """Two networks on one GPU, each on its own streams, alone and at the same time."""
    section = Section(
        "side_by_side",
        "Two models on one GPU",
        "The residual network and the encoder with 128 tokens, in PyTorch, one instance each: alone, and at the "
        "same time. The "
        "last column is the sum of the shares of the rates that both keep: 1 is what taking turns would give.",
        ("batch", "residual alone/s", "encoder alone/s", "residual/s", "encoder/s", "sum of shares"),
    )
    networks = {name: network(name, plan) for name in ("residual", "encoder128")}
    folder = plan.folder / "side_by_side"
    for name, chosen in networks.items():
        file = write_files(chosen, folder / name, {"pytorch"}, max(plan.batches))["pytorch"]
        fields = {"batch": max(plan.batches), "count": 1, "kind": plan.kind}
        write_model(folder / "models", name, "pytorch", file, chosen, **fields)
    with serve(folder / "models") as server:
        for batch in plan.batches:
            if not plan.has_time:
                section.note("The time was over before all rows were measured.")
                return section
            rows = {name: chosen.rows(batch) for name, chosen in networks.items()}
            alone = {name: loaded(server.grpc_url, name, rows[name], 3, plan.seconds).rate for name in networks}
            both = _together(server, rows, plan.seconds)
            shares = sum(both[name] / alone[name] for name in networks)
            section.add(batch, *(f"{one[name]:.0f}" for one in (alone, both) for name in networks), shares)
    return section


def _together(server: weir.Server, rows: dict[str, Any], seconds: float) -> dict[str, float]:
    loads = {name: Load(server.grpc_url, name, one, 3) for name, one in rows.items()}
    with ExitStack() as stack:
        for load in loads.values():
            stack.enter_context(load)
        time.sleep(seconds)
    return {name: load.rate for name, load in loads.items()}

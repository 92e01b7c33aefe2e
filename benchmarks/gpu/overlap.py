"""The section that reads from a trace how much of the copies runs beside the network, with a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.gpu.networks import network, write_files, write_model
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.report import Section
from weir.testing import BackendRun, run_backend

BATCHES = 6
"""Batches in flight one after another while the trace is taken."""

PICTURE = "gpu-overlap.svg"
ROWS = ("copy in", "compute", "copy out")


class Span(NamedTuple):
    """What the device did from `start_us` to `end_us`: one of `ROWS`."""

    row: str
    start_us: float
    end_us: float


def overlap(plan: Plan) -> Section:
    """Traces an instance of the residual network with two batches in flight."""
    section = Section(
        "overlap",
        "Copies beside the run of the batch before",
        "From a trace of PyTorch's profiler (CUPTI) of one instance of the residual network, with batches "
        "waiting: how much of the "
        "time of copies lies within that of kernels.",
        (
            "output copy stream",
            "batch",
            "kernels ms",
            "copies in ms",
            "beside kernels",
            "copies out ms",
            "beside kernels",
        ),
    )
    if importlib.util.find_spec("torch") is None:
        section.note("Left out: the module torch is not installed.")
        return section
    chosen, most = network("residual", plan), max(plan.batches)
    folder = plan.folder / "overlap"
    file = write_files(chosen, folder, {"pytorch"}, most)["pytorch"]
    for is_on in (False, True):
        more = f"optimization {{ cuda {{ output_copy_stream: {str(is_on).lower()} }} }}"
        name = f"copies_{int(is_on)}"
        write_model(folder / "models", name, "pytorch", file, chosen, batch=most, count=1, kind=plan.kind, more=more)
        rows = chosen.rows(most)
        with run_backend(folder / "models" / name, gpus=[0] if plan.on_gpu else []) as model:
            spans = trace(model, rows, plan.on_gpu)
        kernels = [span for span in spans if span.row == "compute"]
        cells: list[object] = [f"{_length(kernels) / 1e3:.2f}"]
        for row in ("copy in", "copy out"):
            copies = [span for span in spans if span.row == row]
            total = _length(copies)
            cells += [f"{total / 1e3:.2f}", f"{_common(copies, kernels) / total:.0%}" if total else "-"]
        section.add("on" if is_on else "off", most, *cells)
    plan.folder.joinpath("results").mkdir(parents=True, exist_ok=True)
    (plan.folder / "results" / PICTURE).write_text(picture(spans))
    section.pictures.append(PICTURE)
    return section


def trace(model: BackendRun, rows: Any, on_gpu: bool) -> list[Span]:
    """What the device does during some batches that wait for each other. A CPU has kernels alone."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    batches = [[{"INPUT": rows}] for _ in range(BATCHES)]
    model.batches(*batches)
    # CUPTI sees all threads; on a CPU this is an option.
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    more = {} if on_gpu else {"experimental_config": torch._C._profiler._ExperimentalConfig(profile_all_threads=True)}
    with profile(activities=[activity], **more) as profiler:
        model.batches(*batches)
        if on_gpu:
            torch.cuda.synchronize()
    spans: list[Span] = []
    for event in profiler.events():
        if on_gpu and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        spans.append(Span(row_of(event.name), event.time_range.start, event.time_range.end))
    return sorted(spans, key=lambda span: span.start_us)


def row_of(name: str) -> str:
    """The row of an event of CUPTI: "Memcpy HtoD (Pinned -> Device)" is a copy in, and every kernel is compute."""
    lower = name.lower()
    return "copy in" if "memcpy htod" in lower else "copy out" if "memcpy dtoh" in lower else "compute"


def _merged(spans: Sequence[Span]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda one: one.start_us):
        if merged and span.start_us <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], span.end_us)
        else:
            merged.append((span.start_us, span.end_us))
    return merged


def _length(spans: Sequence[Span]) -> float:
    return sum(end - start for start, end in _merged(spans))


def _common(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """The time in which one of each runs."""
    return sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in _merged(spans)
        for other_start, other_end in _merged(others)
    )


def picture(spans: Sequence[Span], width: int = 900) -> str:
    """The spans as SVG: a row each for copies in, kernels and copies out."""
    begin = min(span.start_us for span in spans)
    end = max(span.end_us for span in spans)
    colours = dict(zip(ROWS, ("#4c8dd6", "#e0883a", "#5aa75a"), strict=True))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 130" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="130" fill="#ffffff"/>',
    ]
    scale = (width - 90) / (end - begin)
    for number, row in enumerate(ROWS):
        top = 10 + 32 * number
        parts.append(f'<text x="4" y="{top + 16}" fill="#333333">{row}</text>')
        for start_us, end_us in _merged([span for span in spans if span.row == row]):
            x, length = 80 + (start_us - begin) * scale, max(0.3, (end_us - start_us) * scale)
            parts.append(f'<rect x="{x:.1f}" y="{top}" width="{length:.1f}" height="24" fill="{colours[row]}"/>')
    parts.append(f'<text x="80" y="122" fill="#333333">{(end - begin) / 1e3:.2f} ms, {BATCHES} batches</text></svg>')
    return "\n".join(parts) + "\n"

"""The section of a decoupled language model: tokens a second and the time to the first one, beside a bare loop."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from pathlib import Path
from typing import Any

import numpy as np

import weir
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.report import Section

BACKENDS = Path(__file__).parent / "backends"

PROMPT = 32

CONFIG = """
backend: "generator"
max_batch_size: {slots}
input [{{ name: "PROMPT" data_type: TYPE_INT64 dims: [{prompt}] }}, {{ name: "COUNT" data_type: TYPE_INT32 dims: [1] }}]
output [{{ name: "TOKEN" data_type: TYPE_INT32 dims: [1] }}]
model_transaction_policy {{ decoupled: true }}
sequence_batching {{
  iterative_sequence: true
  oldest {{ max_candidate_sequences: {slots} preferred_batch_size: [{slots}] }}
}}
parameters {{ key: "sizes" value {{ string_value: "{sizes}" }} }}
instance_group [{{ count: 1 kind: {kind} }}]
"""


def generator_class() -> Any:
    """The network's class in the file of the backend."""
    spec = importlib.util.spec_from_file_location("benchmark_generator", BACKENDS / "generator" / "backend.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Generator


def prompts(streams: int) -> np.ndarray:
    """The prompt of each stream."""
    return np.random.default_rng(7).integers(0, 32_000, (streams, PROMPT))


def bare(generator: Any, streams: int, tokens: int) -> tuple[float, float, list[int]]:
    """(tokens a second, time to the first token in ms, the tokens of the first stream) of a loop over one full batch."""
    torch = generator.torch
    device = generator.device
    with torch.inference_mode():
        slots = torch.arange(streams, device=device)
        given = torch.from_numpy(prompts(streams)).to(device)
        made: list[int] = []
        began_s = time.perf_counter()
        starts, first_ms = torch.zeros(streams, dtype=torch.int64, device=device), 0.0
        for _ in range(tokens):
            following = generator.step(slots, given, starts)
            made.append(int(following.tolist()[0]))
            first_ms = first_ms or (time.perf_counter() - began_s) * 1e3
            starts = starts + given.shape[1]
            given = following[:, None]
    return streams * tokens / (time.perf_counter() - began_s), first_ms, made


async def served(server: weir.Server, streams: int, tokens: int) -> tuple[float, float, list[int]]:
    """The same of so many concurrent requests; the time to the first token is the median."""
    given, firsts_ms = prompts(streams), list[float]()

    async def one(number: int) -> list[int]:
        made: list[int] = []
        inputs = {"PROMPT": given[number : number + 1], "COUNT": np.array([[tokens]], np.int32)}
        began_s = time.perf_counter()
        async for response in server.astream("generator", inputs):
            if not made:
                firsts_ms.append((time.perf_counter() - began_s) * 1e3)
            made.append(int(response["TOKEN"][0, 0]))
        return made

    began_s = time.perf_counter()
    made = await asyncio.gather(*map(one, range(streams)))
    elapsed_s = time.perf_counter() - began_s
    if any(len(row) != tokens for row in made):
        raise RuntimeError(f"streams had {sorted({len(row) for row in made})} tokens instead of {tokens}")
    return streams * tokens / elapsed_s, float(np.median(firsts_ms)), made[0]


def language_model(plan: Plan) -> Section:
    """Tokens a second and the time to the first token, by the number of streams."""
    section = Section(
        "language_model",
        "A language model with iterative batching",
        f"A decoupled transformer of 110 million parameters (FP16, random weights) makes {plan.tokens} tokens "
        f"after a prompt of "
        f"{PROMPT}. The bare loop runs all streams as one batch from start to end.",
        ("streams", "bare tokens/s", "served tokens/s", "ratio", "bare first token ms", "served first token ms"),
    )
    if importlib.util.find_spec("torch") is None:
        section.note("Left out: the module torch is not installed.")
        return section
    sizes = "768,12,256" if plan.on_gpu else "32,2,64"
    most = max(plan.streams)
    models = plan.folder / "language_model" / "models"
    (models / "generator" / "1").mkdir(parents=True)
    (models / "generator" / "config.pbtxt").write_text(
        CONFIG.format(slots=most, prompt=PROMPT, sizes=sizes, kind=plan.kind)
    )
    generator = generator_class()("cuda:0" if plan.on_gpu else "cpu", sizes, most)
    with weir.Server(models, start_timeout_s=300, backend_directory=[str(BACKENDS)]) as server:

        async def measure() -> None:
            try:
                for streams in plan.streams:
                    if not plan.has_time:
                        section.note("The time was over before all rows were measured.")
                        return
                    for tokens in (2, plan.tokens):  # the first round warms up
                        alone = bare(generator, streams, tokens)
                        through = await served(server, streams, tokens)
                    if alone[2] != through[2] and not plan.on_gpu:  # FP16 may round differently in another batch
                        raise RuntimeError(f"the server made other tokens: {through[2]} instead of {alone[2]}")
                    section.add(
                        streams, f"{alone[0]:.0f}", f"{through[0]:.0f}", through[0] / alone[0], alone[1], through[1]
                    )
            finally:
                await server.aclose()

        asyncio.run(measure())
    return section

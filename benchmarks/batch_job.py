"""Offline jobs under kills, and beside live requests: `python -m benchmarks.batch_job` prints the outcome.

First, `weir batch submit` gets many small pictures, and while the job runs random processes of the server are killed
with kill -9. At the end each item must be in the output once, in order, with the digest of its own file. Then a client
sends requests at a fixed rate to a model with a fixed time per batch, alone and beside a job that could fill every
batch; the model reports which requests shared a batch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tritonclient.grpc.aio as grpc
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.durable.images import digest_of, write_images
from tests.support.durable.models import DIGEST, SLEEPER, write_digest, write_sleeper
from tests.support.durable.restarting_server import ROLES, Served, tireless

_ROOT = Path(__file__).parents[1]
_CLOSE = 1e-3
_POLL_S = 0.05


def weir_batch(server: Served, *words: str) -> list[str]:
    """A command of `weir batch` for this server."""
    return [sys.executable, "-m", "weir", "batch", *words, f"--url={server.http}"]


@dataclass
class JobRun:
    """A job of pictures, and what was found in its output."""

    items: int
    seconds: float = 0.0
    status: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    found: int = 0
    twice: int = 0
    missing: int = 0
    out_of_order: int = 0
    wrong: int = 0
    errors: int = 0
    worst_rss_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        """Whether everything stands there once, in order and right."""
        faults = self.status, self.twice, self.missing, self.out_of_order, self.wrong, self.errors
        return not any(faults)

    def line(self) -> str:
        """The figures in one line."""
        kills = ", ".join(f"{role} {count}" for role, count in self.kills.most_common())
        rss = ", ".join(f"{role} {size / 2**20:.0f} MiB" for role, size in sorted(self.worst_rss_bytes.items()))
        return (
            f"{self.items} items in, {self.found} out after {self.seconds:.1f} s ({self.items / self.seconds:.0f}/s), "
            f"{self.kills.total()} kills ({kills}); twice {self.twice}, missing {self.missing}, "
            f"out of order {self.out_of_order}, wrong {self.wrong}, errors {self.errors}; "
            f"exit status {self.status}; max RSS {rss}"
        )


def run_job(run: JobRun, folder: Path, most_kills: int, every_s: float, seed: int) -> None:
    """Writes the pictures, submits them, kills what it is told to, and looks at what came of it."""
    images, output = folder / "images", folder / "output"
    write_images(images, run.items, seed)
    write_digest(folder / "models")
    draw = random.Random(seed)
    with tireless(folder, folder / "models", f"--batch-root={folder}") as server:
        command = weir_batch(server, "submit", f"--model={DIGEST}", f"--input={images}", f"--output={output}")
        began_s = time.monotonic()
        with (folder / "submit.txt").open("wb") as printed:
            job = subprocess.Popen(
                [*command, "--input-format=files", "--output-format=jsonl"], cwd=_ROOT, stdout=printed, stderr=printed
            )
        kill_at_s, role = began_s + every_s, draw.choice(ROLES)
        try:
            while job.poll() is None:
                server.sample_memory()
                is_due = time.monotonic() > kill_at_s and run.kills.total() < most_kills and output.exists()
                if is_due and server.kill(role):
                    run.kills[role] += 1
                    kill_at_s, role = time.monotonic() + every_s, draw.choice(ROLES)
                time.sleep(_POLL_S)
        finally:
            job.kill()
        run.seconds, run.status = time.monotonic() - began_s, job.wait()
        run.worst_rss_bytes = server.worst_rss_bytes
    compare(run, images, output)


def compare(run: JobRun, images: Path, output: Path) -> None:
    """Looks at the output beside the input, and knows nothing of how it came about."""
    files = sorted(images.glob("*/*.png"))
    seen = bytearray(len(files))
    before = -1
    for shard in sorted(output.glob("part-*.jsonl")):
        for text in shard.read_bytes().splitlines():
            row = json.loads(text)
            number = row["item"]
            run.found += 1
            run.out_of_order += number != before + 1
            before = number
            run.twice += seen[number]
            seen[number] = 1
            if "error" in row:
                run.errors += 1
                continue
            sha256, mean = digest_of(files[number].read_bytes())
            outputs = row["outputs"]
            told_mean = float(np.ravel(outputs["MEAN"])[0])
            is_right = np.ravel(outputs["SHA256"])[0] == sha256 and abs(told_mean - mean) < _CLOSE * mean
            run.wrong += not (is_right and row["source"].endswith(files[number].name))
    run.missing = len(files) - sum(seen)


@dataclass
class Beside:
    """What a live client saw in one window, and what the job got done in it."""

    latencies_ms: list[float] = field(default_factory=list)
    rows_a_batch: list[int] = field(default_factory=list)
    riders: float = 0.0
    """Items of the job in batches that ran for the client."""
    job_items: float = 0.0
    seconds: float = 0.0

    def add(self, other: Beside) -> None:
        """Both windows together."""
        self.latencies_ms += other.latencies_ms
        self.rows_a_batch += other.rows_a_batch
        self.riders += other.riders
        self.job_items += other.job_items
        self.seconds += other.seconds

    def cells(self) -> tuple[str, ...]:
        p50, p90, p99, most = np.percentile(self.latencies_ms, [50, 90, 99, 100])
        riding = f"{self.riders / self.job_items:.0%}" if self.job_items else "-"
        return (
            f"{len(self.latencies_ms)}",
            *(f"{value:.2f}" for value in (p50, p90, p99, most)),
            f"{np.mean(self.rows_a_batch):.1f}",
            f"{self.job_items / self.seconds:.0f}",
            riding,
        )


async def ask_at_rate(server: Served, rate: float, seconds: float) -> Beside:
    """Asks at fixed times, whether the answers to those before have come or not."""
    seen = Beside(seconds=seconds)
    tensor = grpc.InferInput("DATA", [1, 1], "INT64")
    tensor.set_data_from_numpy(np.array([[1]], np.int64))
    counted = job_rows(server)
    async with grpc.InferenceServerClient(server.grpc) as client:
        began_s = time.perf_counter()

        async def ask(number: int) -> None:
            due_s = began_s + number / rate
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            answer = await client.infer(SLEEPER, [tensor])
            seen.latencies_ms.append((time.perf_counter() - due_s) * 1000)
            live, offline = answer.as_numpy("ROWS")[0].tolist()
            seen.rows_a_batch.append(live + offline)
            seen.riders += offline / live  # of all that were live in it, each tells of the same batch

        await asyncio.gather(*(ask(number) for number in range(int(rate * seconds))))
        seen.seconds = time.perf_counter() - began_s
    seen.job_items = job_rows(server) - counted - len(seen.latencies_ms)
    return seen


def job_rows(server: Served) -> float:
    """How many rows the model has run."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("nv_inference_count{") and f'model="{SLEEPER}"' in line
    )


def beside_a_job(folder: Path, options: argparse.Namespace) -> list[tuple[str, Beside]]:
    """The client alone, and beside the job, in turn: the job is paused meanwhile."""
    write_sleeper(folder / "models", options.batch_ms / 1000, options.rows, options.instances)
    rows = folder / "rows.npy"
    # More than could be done without other load.
    items = int((options.seconds + 5) * options.rounds * options.instances * options.rows / (options.batch_ms / 1000))
    np.save(rows, np.full((items, 1), -1, np.int64))
    seen: list[tuple[str, Beside]] = []
    with tireless(folder, folder / "models", f"--batch-root={folder}") as server:
        asyncio.run(ask_at_rate(server, options.rate, 2.0))
        submit = weir_batch(server, "submit", f"--model={SLEEPER}", f"--input={rows}", f"--output={folder / 'rows'}")
        done = subprocess.run([*submit, "--no-wait"], cwd=_ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the job was not taken: {done.stderr}")
        id = done.stdout.strip()
        for number in range(options.rounds):
            have_job(server, id, "pause", "paused")
            seen.append((f"{number + 1} without", asyncio.run(ask_at_rate(server, options.rate, options.seconds))))
            have_job(server, id, "resume", "running")
            counted = job_rows(server)
            while job_rows(server) < counted + options.rows:
                time.sleep(_POLL_S)
            seen.append((f"{number + 1} with", asyncio.run(ask_at_rate(server, options.rate, options.seconds))))
        have_job(server, id, "cancel", "cancelled")
    return seen


def have_job(server: Served, id: str, verb: str, state: str) -> None:
    """Has it do something else, and waits until it does, a minute at most."""
    subprocess.run(weir_batch(server, verb, id), cwd=_ROOT, capture_output=True, check=True)
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{server.http}/v2/jobs/{id}") as answer:
            reply = json.load(answer)["state"]
            if reply == state:
                return
            if reply in ("cancelled", "succeeded", "failed"):
                break
        time.sleep(_POLL_S)
    raise SystemExit(f"the job did not become {state}")


def table_of(seen: list[tuple[str, Beside]], options: argparse.Namespace) -> Table:
    title = (
        f"A client at {options.rate:g} requests/s; batches of up to {options.rows} rows take {options.batch_ms:g} ms, "
        f"{options.instances} at a time"
    )
    table = Table(box=box.SIMPLE_HEAD, title=title)
    for heading in (
        "the job",
        "requests",
        "p50 ms",
        "p90 ms",
        "p99 ms",
        "max ms",
        "rows a batch",
        "job items/s",
        "riding",
    ):
        table.add_column(heading, justify="left" if heading == "the job" else "right")
    for name, beside in seen:
        table.add_row(name, *beside.cells())
    for name in ("without", "with"):
        together = Beside()
        for of, beside in seen:
            if of.endswith(" " + name):
                together.add(beside)
        table.add_row(f"all {name}", *together.cells())
    return table


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=100_000, help="pictures; 0 to leave this part out")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=float, default=1.5, help="seconds from one kill to the next")
    parser.add_argument("--seed", type=int, default=1, help="of pictures and kills")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each window; 0 to leave this part out")
    parser.add_argument("--rounds", type=int, default=3, help="windows without the job, and with it")
    parser.add_argument("--rate", type=float, default=60.0, help="live requests a second")
    parser.add_argument("--batch-ms", type=float, default=10.0)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--instances", type=int, default=2)
    options = parser.parse_args()
    run = JobRun(options.items)
    if options.items:
        with tempfile.TemporaryDirectory(prefix="batch-job-") as folder:
            run_job(run, Path(folder), options.kills, options.every, options.seed)
            if not run.is_clean:
                print((Path(folder) / "submit.txt").read_text()[-2000:], file=sys.stderr)
        print(run.line(), flush=True)
    if options.seconds:
        with tempfile.TemporaryDirectory(prefix="batch-job-") as folder:
            seen = beside_a_job(Path(folder), options)
        Console(width=140).print(table_of(seen, options))
        print("riding: the share of the job's items that ran in batches of the client's requests")
    return 0 if run.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())

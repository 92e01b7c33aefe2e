"""Faulty models (crash, hang, memory, load failure) don't affect other requests: F-12 to F-16."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from tests.faults.loads.http_caller import Answer, HttpCaller
from tests.faults.memory_group import memory_group
from tests.faults.models import DIGEST, FRAIL, bytes_request, produce, write_models
from tests.faults.report import FaultReport, Skipped
from tests.faults.scene import Scene, Task, scene
from tests.support.control_group import ControlGroup

_MATES = 32
_HUNG_MS = 1500
_MEMORY_BYTES = 120 << 20
_CONTAINER_BYTES = 400 << 20
"""Memory limit: less than the model allocates, more than a restarted worker and its processes need."""

_CONFIG = """
backend: "python" max_batch_size: 1
input { name: "IN" data_type: TYPE_INT64 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT64 dims: [ 1 ] }
"""


async def poison(task: Task) -> FaultReport:
    """F-12: requests that kill the model's process fail after some attempts; others succeed."""
    line = FaultReport("F-12", "requests that kill their model each time", seed=task.seed)
    async with _with_frail(task, line) as on:
        slow_s: list[float] = []
        for number in range(task.times(5)):
            began_s = time.monotonic()
            answer, _ = await asyncio.gather(_say(on, b"exit"), asyncio.sleep(0))
            line.expect(answer.status in (500, 503), f"a poisonous request was answered {answer.status}")
            line.requests += 1
            line.faults["live"] += 1
            reply = await produce(on.cluster.nats_url, FRAIL, b"exit", f"poison-{number}")
            line.requests += 1
            line.faults["durable"] += 1
            on.others += 1
            line.expect(reply["weir-outcome"] != "succeeded", f"a poisonous request ended as {reply['weir-outcome']}")
            line.expect(int(reply["weir-attempts"]) <= 5, f"it was tried {reply['weir-attempts']} times")
            slow_s.append(time.monotonic() - began_s)
            good = await _say(on, b"fine")
            line.expect(b"fine" in good.body, f"a good request was answered {good.status}")
        line.notes.append(f"a poisonous request ends after {max(slow_s, default=0):.1f} s at most")
    return line


async def poison_in_batch(task: Task) -> FaultReport:
    """F-13: one bad request among 32 that share a batch fails alone."""
    line = FaultReport("F-13", "one bad request in a batch of 32", seed=task.seed)
    good = 0
    async with _with_frail(task, line) as on:
        for number in range(task.times(6)):
            word = (b"raise", b"exit")[number % 2]
            place = on.draw.randrange(_MATES)
            words = [word if at == place else b"good-%d-%d" % (number, at) for at in range(_MATES)]
            answers = await asyncio.gather(*(_say(on, w) for w in words))
            line.requests += _MATES
            line.faults[word.decode()] += 1
            fine = sum(a.status == 200 and w in a.body for w, a in zip(words, answers, strict=True))
            good += fine
            line.wrong += sum(a.status == 200 and w not in a.body for w, a in zip(words, answers, strict=True))
            line.expect(fine == _MATES - 1, f"{word.decode()}: {fine} of {_MATES - 1} batch mates succeeded")
            line.expect(answers[place].status in (500, 503), f"the bad one was answered {answers[place].status}")
    line.notes.append(f"batch mates that succeeded {good} of {line.faults.total() * (_MATES - 1)}")
    return line


async def hung(task: Task) -> FaultReport:
    """F-14: a model that loops or holds the interpreter's lock is killed at its time-out; the next request runs."""
    line = FaultReport("F-14", f"a model that hangs (time-out {_HUNG_MS} ms)", seed=task.seed)
    async with _with_frail(task, line, {"weir_execution_timeout_ms": str(_HUNG_MS)}) as on:
        answered_s: list[float] = []
        for number in range(task.times(4)):
            word = (b"loop", b"block")[number % 2]
            began_s = time.monotonic()
            answer = await _say(on, word)
            answered_s.append(time.monotonic() - began_s)
            line.faults[word.decode()] += 1
            line.expect(answer.status in (500, 503, 504), f"{word.decode()} was answered {answer.status}")
            good = await _say(on, b"fine")
            line.expect(b"fine" in good.body, f"after {word.decode()} a good request was answered {good.status}")
            line.requests += 2
            line.recoveries_s.append(time.monotonic() - began_s)
        line.notes.append(f"answered after {max(answered_s, default=0):.1f} s at most")
    return line


async def out_of_memory(task: Task) -> FaultReport:
    """F-15: a model that eats memory is ended, with a named error, and begun anew; nobody else sees an error.

    By Weir, where it has a limit; then by the kernel, where the container of its worker has one.
    """
    line = FaultReport("F-15", f"a model that eats memory (limit {_MEMORY_BYTES >> 20} MiB)", seed=task.seed)
    async with _with_frail(task, line, {"weir_memory_limit_bytes": str(_MEMORY_BYTES)}) as on:
        await _eat(on, "ended by Weir")
    try:
        with memory_group(_CONTAINER_BYTES) as container:
            await _out_of_container(replace(task, folder=task.folder / "container"), line, container)
    except Skipped as reason:
        line.notes.append(f"nothing was ended by the kernel: {reason}")
    return line


async def _out_of_container(task: Task, line: FaultReport, container: ControlGroup) -> None:
    task.folder.mkdir()
    async with _with_frail(task, line) as on:
        for member in on.cluster.of("worker"):
            process = psutil.Process(member.pid)
            container.add([member.pid, *(child.pid for child in process.children(recursive=True))])
        await _eat(on, "ended by the kernel")
        line.expect(container.kills >= line.faults["ended by the kernel"], f"the kernel ended {container.kills}")
        line.notes.append(f"processes that the kernel killed {container.kills}")
        lives = {member.name: member.lives for member in on.cluster.members.values()}
        line.expect(set(lives.values()) == {1}, f"a role has died: {lives}")


async def _eat(on: Scene, how: str) -> None:
    line = on.line
    for _ in range(on.task.times(3)):
        began_s = time.monotonic()
        answer = await _say(on, b"eat")
        line.faults[how] += 1
        line.expect(answer.status in (500, 503), f"it was answered {answer.status}")
        good = await _say(on, b"fine")
        line.expect(b"fine" in good.body, f"a good request was answered {good.status}")
        line.requests += 2
        line.recoveries_s.append(time.monotonic() - began_s)
    line.notes.append(f"{how}, told: {json.loads(answer.body).get('error', '')[:90]}")


async def bad_loads(task: Task) -> FaultReport:
    """F-16: models that fail to load are UNAVAILABLE with the reason; the server serves the others."""
    line = FaultReport("F-16", "models that can't be loaded", seed=task.seed)
    bad = {
        "raises": ("raise ValueError('not today')", ""),
        "dies": ("import os; os._exit(7)", ""),
        "no_code": ("this is no Python", ""),
        "bad_config": ("", "max_batch_size: many"),
        "no_backend": ("", 'backend: "nobody" max_batch_size: 1'),
    }

    def write(repository: Path) -> None:
        write_models(repository)
        for name, (code, config) in bad.items():
            (repository / name / "1").mkdir(parents=True)
            (repository / name / "1" / "model.py").write_text(code)
            (repository / name / "config.pbtxt").write_text(config or _CONFIG)

    explicit = "--model-control-mode=explicit"
    options = {"worker": (explicit, f"--load-model={DIGEST}")}
    async with scene(task, line, task.shape(options=options), models=write) as on:
        caller = HttpCaller(on.cluster.http())
        for _ in range(task.times(2)):
            for name in bad:
                answer = await caller.ask(f"/v2/repository/models/{name}/load")
                line.faults[name] += 1
                line.requests += 1
                line.expect(400 <= answer.status < 600, f"loading {name} was answered {answer.status}")
                reply = json.loads(answer.body).get("error", "")
                line.expect(name in reply, f"the error does not name {name}: {reply!r}")
                index = json.loads((await caller.ask("/v2/repository/index")).body)
                states = [row for row in index if row["name"] == name]
                is_away = all(row.get("state", "UNAVAILABLE") == "UNAVAILABLE" for row in states)
                line.expect(bool(states) and is_away, f"{name} stands as {states}")
        caller.close()
        lives = {member.name: member.lives for member in on.cluster.members.values()}
        line.expect(set(lives.values()) == {1}, f"a role has died: {lives}")
    return line


def _with_frail(task: Task, line: FaultReport, parameters: dict[str, str] | None = None):  # type: ignore[no-untyped-def]
    models = partial(write_models, names=(DIGEST, FRAIL), frail_parameters=parameters)
    return scene(task, line, clients=4, rate=20.0, models=models)


async def _say(on: Scene, word: bytes) -> Answer:
    caller = HttpCaller(on.cluster.http())
    body, headers = bytes_request(word)
    try:
        return await asyncio.wait_for(caller.ask(f"/v2/models/{FRAIL}/infer", body, headers), 60)
    finally:
        caller.close()

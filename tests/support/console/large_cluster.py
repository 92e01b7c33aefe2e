"""`LargeCluster`: the answers of a console's server for a cluster of 200 models on 50 workers under load.

They change each second as those of a real cluster do. One model, one reason and one process have names that would run a
script if the page took them for HTML.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from typing import Any

from weir.cluster.status.findings import findings_of
from weir.cluster.status.problems import state_of
from weir.cluster.status.snapshot import ADVICE, LEVELS, Kind, Problem

HOSTILE = "<img src=x onerror=\"window.hacked='model'\">"
HOSTILE_REASON = "<svg onload=\"window.hacked='reason'\">failed</svg>"
TRACE = "Internal: ValueError: no weights\n\nAt:\n  /models/net/1/model.py(12): initialize\n"
"""The reason of a Python model that can't be loaded."""

SPLIT = "model-002"
"""A model with two versions, a traffic rule, a ramp and copies."""

FAILED_JOB = "batch-00000000000000ff"
"""A job in which most items failed."""

HOSTILE_HOST = "<b onmouseover=\"window.hacked='host'\">host</b>"

MODELS, WORKERS, SCHEDULERS, GATEWAYS, HOSTS = 200, 50, 4, 3, 10

FINE_S, COARSE_S = 600, 3600

Json = dict[str, Any]

SPLIT_TRAFFIC: Json = {
    "model": SPLIT,
    "source": "set",
    "weights": {"1": 50.0, "2": 50.0},
    "sticky": "",
    "versions": [],
    "shadow": {"version": "2", "share": 20.0, "compare": True},
    "ramp": {
        "version": "2",
        "state": "aborted",
        "step": 3,
        "steps": 9,
        "to": 100.0,
        "over_s": 1800.0,
        "abort_if": "error_rate>1%",
        "reason": "12 of 40 requests failed",
    },
}


class LargeCluster:
    """The state of the cluster. Each method is what a route answers."""

    def __init__(self, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self.models = [HOSTILE, *(f"model-{number:03}" for number in range(1, MODELS))]
        self.workers = [f"worker-{number % HOSTS:08x}-{number:08x}" for number in range(WORKERS)]
        self.schedulers = [f"scheduler-{number:08x}-{number:08x}" for number in range(SCHEDULERS)]
        self.gateways = [f"gateway-{number:08x}-{number:08x}" for number in range(GATEWAYS)]
        self.started_ms = self._now_ms()
        self.gateway_urls = ["http://127.0.0.1:8123", "grpc://127.0.0.1:8124"]
        self.silent: set[str] = set()
        self.broker_error = ""
        self.callers: list[dict[str, Any]] = []
        """Who has requests in flight at each queue."""
        self.has_gateway = True
        self.control_mode = "explicit"
        self.failing = {HOSTILE: HOSTILE_REASON}
        self.without_worker: list[str] = []
        self.unloaded: set[str] = set()
        self.dead_letters = 0
        self._sequence = 0

    def _now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def session(self, allow_changes: bool) -> Json:
        """GET /api/session."""
        return {
            "release": "0.0",
            "allow_changes": allow_changes,
            "cluster": {"url": "nats://127.0.0.1:4222", "access_file": "/data/mine/nats-url", "is_connected": True},
            "tick_ms": 1000,
            "now_ms": self._now_ms(),
        }

    def status(self) -> Json:
        """GET /api/status."""
        if self.broker_error:
            return self._answer("unreachable", [], error=self.broker_error)
        problems = list(self._problems())
        return self._answer(state_of(problems), problems)

    def _problems(self) -> Iterator[Problem]:
        def problem(kind: Kind, about: str, text: str, advice: str = "") -> Problem:
            return Problem(level=LEVELS[kind], kind=kind, about=about, text=text, advice=advice)

        if not self.has_gateway:
            yield problem("no gateway", "", "no gateway replies: clients can't connect", "start a gateway")
        for id in sorted(self.silent):
            text = f"worker {id} does not reply: it is dead, suspended or disconnected"
            yield problem("silent process", id, text, "look at its log and at its host")
        for name, reason in self.failing.items():
            advice = "correct the model's files and load it again"
            yield problem("model fails", name, f"model '{name}' fails: {reason}", advice)
        for name in self.without_worker:
            yield problem("model without worker", name, f"model '{name}' has no worker: 1 request waits")
        yield problem("sync unknown", "", "sync is unknown", "give the gateways `--nats-monitor`")
        if self.dead_letters:
            text = f"{self.dead_letters} dead letters of 'model-001'"
            yield problem("dead letters", "model-001", text, ADVICE["dead letters"])

    def _answer(self, state: str, problems: list[Problem], error: str = "") -> Json:
        gateways = self.gateways if self.has_gateway else []
        roles = [self._role("gateway", id, number) for number, id in enumerate(gateways)]
        roles += [self._role("scheduler", id, number) for number, id in enumerate(self.schedulers)]
        roles += [self._role("worker", id, number) for number, id in enumerate(self.workers)]
        hosts = [
            {
                "id": f"{number:08x}",
                "name": self._host(number),
                "gateways": 1,
                "schedulers": 1,
                "workers": WORKERS // HOSTS,
                "instances": 16,
                "busy": 8,
                "utilization": 0.5,
            }
            for number in range(HOSTS)
        ]
        lanes = {"live": {"depth": 0, "oldest_s": 0.0}}
        queues = [
            {
                "model": name,
                "namespace": "",
                "partition": 0,
                "owner": self.schedulers[place % SCHEDULERS],
                "epoch": 1,
                "claims": [self.schedulers[place % SCHEDULERS]],
                "frames": self._random.randrange(40),
                "lanes": {"live": {"depth": self._random.randrange(20), "oldest_s": 0.01}, "batch": lanes["live"]},
                "callers": self.callers,
            }
            for place, name in enumerate(self.models)
        ]
        stream = {"storage": "memory", "replicas": 1, "leader": "", "behind": []}
        return {
            "schema_version": 1,
            "taken_ms": self._now_ms(),
            "state": state,
            "error": error,
            "problems": [problem.model_dump() for problem in problems],
            "findings": [finding.model_dump() for finding in findings_of(problems)],
            "broker": {
                "url": "127.0.0.1:4222",
                "version": "2.15.1",
                "cluster": "",
                "servers": [],
                "durability": "yes",
                "streams": [
                    {"name": "LIVE", "messages": 120, "bytes": 1 << 20, "max_bytes": 1 << 29, **stream},
                    {"name": "QUEUE", "messages": 0, "bytes": 0, "max_bytes": -1, **stream},
                ],
            },
            "hosts": hosts,
            "roles": roles,
            "models": [
                {
                    "name": name,
                    "namespace": "",
                    "versions": [self._version(name, place, 1)],
                    "workers": self._workers_of(place),
                    "reasons": [],
                    "rejected": [],
                    "scaled_to_zero": False,
                    "utilization": 0.5,
                    "desired_workers": 1,
                }
                for place, name in enumerate(self.models)
            ],
            "queues": queues,
            "durable": [],
            "dead": [{"model": HOSTILE, "namespace": "", "letters": 2}],
        }

    def _host(self, number: int) -> str:
        return HOSTILE_HOST if number == 0 else f"node-{number}"

    def _workers_of(self, place: int) -> list[str]:
        return [self.workers[(place + step * 7) % WORKERS] for step in range(2)]

    def _role(self, role: str, id: str, number: int) -> Json:
        is_worker = role == "worker"
        return {
            "role": role,
            "id": id,
            "host": f"{number % HOSTS:08x}",
            "host_name": self._host(number % HOSTS),
            "pid": 1000 + number,
            "release": "0.0",
            "since_ms": self.started_ms,
            "state": "silent" if id in self.silent else "up",
            "urls": self.gateway_urls if role == "gateway" else [],
            "queues": MODELS // SCHEDULERS if role == "scheduler" else 0,
            "loop_lag_s": 0.002,
            "unreadable": [],
            "models": 8 if is_worker else 0,
            "instances": 8 if is_worker else 0,
            "batches": 3 if is_worker else 0,
            "busy": self._random.randrange(8) if is_worker else 0,
            "utilization": round(self._random.random(), 3) if is_worker else None,
        }

    def _version(self, name: str, place: int, version: int) -> Json:
        is_failing = name in self.failing
        return {
            "version": version,
            "state": "UNAVAILABLE" if is_failing else "READY",
            "workers": 2,
            "instances": 2,
            "busy": self._random.randrange(3),
            "reasons": [self.failing[name]] if is_failing else [],
            "weight": 50.0 if name == SPLIT else None,
            "share": 0.5 if name == SPLIT else None,
        }

    def index(self) -> Json:
        """GET /api/models."""
        rows = []
        for place, name in enumerate(self.models):
            version = self._version(name, place, 1)
            rows.append(
                {
                    "id": name,
                    "name": name,
                    "namespace": "",
                    "state": version["state"],
                    "reason": self.failing.get(name, ""),
                    "versions": [
                        {**{key: version[key] for key in ("state", "share", "instances", "busy")}, "version": number}
                        for number in ((1, 2) if name == SPLIT else (1,))
                    ],
                    "requests_per_s": self._asked(round(self._random.expovariate(0.02), 1)),
                    "failures_per_s": self._asked(0.0),
                    "p50_ms": self._asked(round(self._random.uniform(0.5, 9), 2)),
                    "p99_ms": self._asked(round(self._random.uniform(9, 90), 2)),
                    "queue_depth": self._random.randrange(20),
                    "batch_size": self._asked(round(self._random.uniform(1, 16), 1)),
                    "utilization": round(self._random.random(), 3),
                    "workers": 2,
                    "loaded": True,
                }
            )
        return {"at_ms": self._now_ms(), "control_mode": self.control_mode, "models": rows}

    def _asked(self, value: float) -> float | None:
        """A number of requests, which is unknown without a gateway."""
        return value if self.has_gateway else None

    def series(self, model: str, since_ms: int) -> Json:
        """GET /api/series."""
        now_ms = self._now_ms()
        steps = []
        for step_ms, span_s in ((1000, FINE_S), (10_000, COARSE_S)):
            last_ms = now_ms - now_ms % step_ms
            at_ms = [at for at in range(last_ms - span_s * 1000 + step_ms, last_ms + step_ms, step_ms) if at > since_ms]
            columns = {
                "requests_per_s": [
                    round(2000 + 900 * math.sin(at / 40_000) + 200 * math.sin(at / 1700), 1) for at in at_ms
                ],
                "failures_per_s": [0.0 if at % 60_000 else 12.0 for at in at_ms],
                "p50_ms": [round(4 + 2 * math.sin(at / 30_000), 2) for at in at_ms],
                "p99_ms": [round(25 + 9 * math.sin(at / 9000), 2) for at in at_ms],
                "queue_depth": [max(0, round(40 * math.sin(at / 20_000))) for at in at_ms],
                "queue_oldest_s": [round(max(0.0, 0.04 * math.sin(at / 20_000)), 4) for at in at_ms],
                "batch_size": [round(8 + 4 * math.sin(at / 40_000), 1) for at in at_ms],
                "utilization": [round(0.6 + 0.3 * math.sin(at / 40_000), 3) for at in at_ms],
            }
            if not self.has_gateway:
                unknown = ("requests_per_s", "failures_per_s", "p50_ms", "p99_ms", "batch_size")
                columns |= {name: [None for _ in at_ms] for name in unknown}
            if not model:
                columns |= {
                    "cpu_utilization": [round(0.5 + 0.2 * math.sin(at / 40_000), 3) for at in at_ms],
                    "gpu_utilization": [None for _ in at_ms],
                    "memory_bytes": [9 << 30 for _ in at_ms],
                    "gpu_memory_bytes": [None for _ in at_ms],
                }
            steps.append({"step_ms": step_ms, "at_ms": at_ms, **columns})
        return {"resolution": steps}

    def model(self, name: str) -> Json | None:
        """GET /api/models/NAME; None if there is none."""
        if name not in self.models:
            return None
        tensors = [{"name": "IN", "datatype": "FP32", "shape": [-1, 4]}]
        outputs = [{"name": "OUT", "datatype": "FP32", "shape": [-1, 3]}]
        entry = {"count": "12", "ns": "48000000"}
        return {
            "id": name,
            "name": name,
            "versions": [] if name in self.unloaded else [1],
            "reason": "",
            "metadata": None
            if not self.has_gateway or name in self.unloaded
            else {"name": name, "versions": ["1"], "platform": "", "inputs": tensors, "outputs": outputs},
            "config": {"name": name, "max_batch_size": 16, "dynamic_batching": {"max_queue_delay_microseconds": 2000}},
            "completed": ["dynamic_batching"],
            "statistics": [
                {
                    "name": name,
                    "version": "1",
                    "inference_count": "12",
                    "execution_count": "6",
                    "last_inference": self._now_ms(),
                    "inference_stats": {"success": entry, "queue": entry, "compute_infer": entry},
                    "batch_stats": [],
                }
            ],
            "history": {
                "model": name,
                "changes": [{"number": 3, "model": name, "kind": "load", "at_ms": self.started_ms, "by": HOSTILE}],
            },
            "traffic": self._traffic(name) if self.has_gateway else None,
            "inputs": [{**tensors[0], "batches": True}],
            "sample": {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [0, 0, 0, 0]}]},
            "labels": {"OUT": 3},
        }

    def _traffic(self, name: str) -> Json:
        return SPLIT_TRAFFIC if name == SPLIT else {"model": name, "source": "none", "weights": {}, "versions": []}

    def batching(self, model: str, after: int) -> Json:
        """GET /api/batching: 40 batches for each call."""
        now_ms = self._now_ms()
        batches = []
        for place in range(40):
            self._sequence += 1
            rows = self._random.randint(4, 16)
            held_us = self._random.randint(900, 2000) if rows < 16 else self._random.randint(200, 1500)
            batches.append(
                {
                    "seq": self._sequence,
                    "id": self._sequence,
                    "at_ms": now_ms - 500 + place * 12,
                    "version": 1,
                    "instance": place % 2,
                    "worker": self.workers[place % 2],
                    "size": rows,
                    "rows": rows,
                    "request_rows": [1] * rows,
                    "padding": 16 - rows if rows > 12 else 0,
                    "waited_us": [
                        *sorted((self._random.randint(0, held_us) for _ in range(rows - 1)), reverse=True),
                        held_us,
                    ],
                    "lanes": ["live"] * rows,
                    "gateways": [self.gateways[0]] * rows,
                    "held_us": held_us,
                    "busy_us": 9000,
                    "reason": HOSTILE_REASON if place == 0 else "full" if rows == 16 else "delay",
                }
            )
        settings = {"max_batch_size": 16, "preferred": [], "max_queue_delay_us": 2000}
        return {"next": self._sequence, "dropped": 0, "settings": settings, "batches": batches}

    def requests(self) -> list[Json]:
        """GET /api/requests."""
        now_ms = self._now_ms()
        return [
            {
                "id": HOSTILE if not number else f"request-{number}",
                "key": f"gateway-0/{number}",
                "model": self.models[number],
                "version": 1,
                "at_ms": now_ms - number * 40,
                "duration_ms": 3.2 + number,
                "status": "ok",
                "protocol": "HTTP",
            }
            for number in range(50)
        ]

    def request(self, id: str) -> Json:
        """GET /api/requests/ID."""
        if id.startswith("unknown"):
            return {"found": "none", "trace": None, "record": None}
        spans = [
            ("HTTP", 0, 6400),
            ("send", 80, 240),
            ("queue", 240, 2300),
            ("input", 2350, 2600),
            ("compute", 2600, 5900),
            ("output", 5900, 6100),
            ("response", 6100, 6380),
        ]
        trace = {
            "id": id,
            "model": HOSTILE,
            "version": 1,
            "protocol": "HTTP",
            "batch": {"id": 77, "size": 3, "with": [id, "request-2", HOSTILE]},
            "worker": self.workers[0],
            "instance": "0",
            "spans": [{"name": name, "start_us": start, "end_us": end} for name, start, end in spans],
        }
        return {"found": "trace", "trace": trace, "record": None}

    def jobs(self) -> Json:
        """GET /api/jobs."""
        now_ms = self._now_ms()
        job = {
            "id": "batch-0123456789abcdef",
            "kind": "batch",
            "state": "running",
            "wanted": "run",
            "model": HOSTILE,
            "input": [HOSTILE],
            "output": "/data/out",
            "total": 1000,
            "done": 400,
            "failed": 3,
            "rate_per_s": 80.0,
            "left_s": 7.5,
            "created_ms": now_ms - 5000,
            "started_ms": now_ms - 5000,
            "ended_ms": 0,
            "updated_ms": now_ms,
            "owner": "",
            "note": HOSTILE_REASON,
            "error": "",
        }
        ended = {
            "state": "succeeded",
            "total": 5,
            "done": 5,
            "failed": 4,
            "rate_per_s": 0.0,
            "left_s": None,
            "note": "",
        }
        return {"jobs": [job, {**job, **ended, "id": FAILED_JOB, "ended_ms": now_ms}]}

    def job(self, id: str) -> Json | None:
        """GET /api/jobs/ID; None if there is none."""
        return next((job for job in self.jobs()["jobs"] if job["id"] == id), None)

    def tried(self) -> Json:
        """POST /api/try/NAME."""
        outputs = [{"name": "OUT", "datatype": "FP32", "shape": [1, 3], "data": [0.1, 0.7, 0.2]}]
        response = {"model_name": "model", "model_version": "1", "outputs": outputs}
        hops = self.request("request-1")["trace"]["spans"]
        return {"status": 200, "response": response, "duration_ms": 6.4, "id": "request-1", "hops": hops}

    def dead(self) -> Json:
        """GET /api/dead."""
        letter = {"id": HOSTILE, "model": HOSTILE, "reason": HOSTILE_REASON, "attempts": 3, "size_bytes": 4711}
        return {"total": 2, "letters": [{"seq": seq, "at_ms": self.started_ms, **letter} for seq in (4, 9)]}

    def letter(self, seq: int) -> Json:
        """GET /api/dead/SEQ."""
        row = next(row for row in self.dead()["letters"] if row["seq"] == seq)
        history = [{"ended_ms": self.started_ms, "reason": HOSTILE_REASON}]
        return {
            **row,
            "history": history,
            "headers": [["Weir-Id", HOSTILE]],
            "preview": {"text": HOSTILE},
            "is_complete": True,
        }

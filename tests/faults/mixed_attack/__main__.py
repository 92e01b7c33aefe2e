"""`python -m tests.faults.mixed_attack --seconds 600 --seed 7`: attacks of many kinds beside 50 honest clients.

Honest clients (HTTP, gRPC, NATS, durable requests) call a `weir serve` with a few small models and check every
response, first alone, then beside attackers driven by the seed. The benchmark prints the results of the honest
requests, their latency beside that without attacks, the peak memory and the restarts of each role, and the longest time
for which an event loop was blocked. The exit status is 1 if an honest request was lost or answered wrongly, or a role
was restarted. All traffic is on loopback.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import psutil

from tests.faults.mixed_attack.attacks import ATTACKS
from tests.faults.mixed_attack.honest import TIMEOUT_S
from tests.faults.mixed_attack.models import write_models
from weir import Server
from weir.runtime.child_processes import dies_with_parent

ROLES = ("gateway", "scheduler", "worker", "nats-server")
_ATTACK_END_S = 60.0
"""Time for running attacks to finish after the end."""


class Watch(threading.Thread):
    """Samples the server's processes and metrics twice a second until `end` is called."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._is_over = threading.Event()
        self.peak_bytes: dict[str, int] = defaultdict(int)
        self.lag_s: dict[str, float] = defaultdict(float)
        self.contained: dict[str, float] = {}
        self.pids: dict[str, set[int]] = defaultdict(set)

    def run(self) -> None:
        """Sample until the end."""
        while not self._is_over.wait(0.5):
            self._look_at_processes()
            self._look_at_metrics()

    def end(self) -> None:
        """Stop sampling."""
        self._is_over.set()
        self.join()

    def restarts(self) -> dict[str, int]:
        """Number of restarts by role, without roles that were not restarted."""
        return {role: len(pids) - 1 for role, pids in self.pids.items() if len(pids) > 1}

    def _look_at_processes(self) -> None:
        try:
            children = psutil.Process(self._server.pid).children()
        except psutil.NoSuchProcess:
            return
        for child in children:
            try:
                command = " ".join(child.cmdline())
                role = next((role for role in ROLES if role in command), "")
                if not role:
                    continue
                self.pids[role].add(child.pid)
                self.peak_bytes[role] = max(self.peak_bytes[role], child.memory_info().rss)
                if role == "worker":
                    models = sum(one.memory_info().rss for one in child.children(recursive=True))
                    self.peak_bytes["Python models"] = max(self.peak_bytes["Python models"], models)
            except psutil.Error:
                continue

    def _look_at_metrics(self) -> None:
        try:
            with urllib.request.urlopen(self._server.metrics_url, timeout=5.0) as answer:
                text = answer.read().decode()
        except OSError:
            return
        for line in text.splitlines():
            name, _, rest = line.partition("{")
            if name not in ("weir_loop_lag_seconds", "weir_contained_failures_total"):
                continue
            labels, _, value = rest.rpartition("} ")
            role = next((role for role in ROLES if f'"{role}' in labels), labels)
            if name == "weir_loop_lag_seconds":
                self.lag_s[role] = max(self.lag_s[role], float(value))
            else:
                self.contained[labels] = float(value)


def started(module: str, places: dict[str, Any]) -> subprocess.Popen[str]:
    """Start a process of this benchmark, which prints JSON at its end."""
    command = [sys.executable, "-m", f"tests.faults.mixed_attack.{module}", json.dumps(places)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=dies_with_parent())


def result(process: subprocess.Popen[str], timeout_s: float) -> Any:
    """Its output. Kills it after the time-out."""
    try:
        printed, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise SystemExit(f"{process.args!r} has not ended after {timeout_s:.0f} s") from None
    if process.returncode:
        raise SystemExit(f"{process.args!r} ended with status {process.returncode}")
    return json.loads(printed)


def percentile_ms(times_s: list[float], share: float) -> float:
    """The quantile in milliseconds; 0 without values."""
    return sorted(times_s)[min(len(times_s) - 1, int(share * len(times_s)))] * 1000 if times_s else 0.0


def latency(times_s: list[float]) -> str:
    """p50, p99 and maximum in milliseconds."""
    return " / ".join(f"{percentile_ms(times_s, share):.1f}" for share in (0.5, 0.99, 1.0))


def report(alone: dict[str, Any], beside: dict[str, Any], attacks: dict[str, dict[str, int]], watch: Watch) -> bool:
    """Print the results; returns whether all expectations held."""
    print("| honest clients | requests | lost | wrong | failed | alone: p50 / p99 / max ms | beside attacks |")
    print("|---|---|---|---|---|---|---|")
    lost, wrong = Counter[str](), Counter[str]()
    failed: Counter[str] = Counter()
    for kind, ledger in beside.items():
        counts = [sum(ledger[name].values()) for name in ("lost", "wrong", "failed")]
        cells = [kind, len(ledger["times_s"]) + sum(counts), *counts]
        cells += [latency(alone[kind]["times_s"]), latency(ledger["times_s"])]
        print(f"| {' | '.join(map(str, cells))} |")
        for counted, name in ((lost, "lost"), (wrong, "wrong"), (failed, "failed")):
            counted.update({f"{kind}, {what}": count for what, count in ledger[name].items()})
    for title, counted in (("lost", lost), ("wrong", wrong), ("failed", failed)):
        for what, count in counted.most_common(12):
            print(f"{title}: {count} x {what}")
    print("\n| attack | runs | outcomes |\n|---|---|---|")
    for name, outcomes in sorted(attacks.items()):
        reply = ", ".join(f"{outcome} {count}" for outcome, count in Counter(outcomes).most_common(5))
        print(f"| {name} | {sum(outcomes.values())} | {reply} |")
    print("\npeak RSS, MiB:", ", ".join(f"{role} {size >> 20}" for role, size in sorted(watch.peak_bytes.items())))
    print("loop lag, greatest, s:", ", ".join(f"{role} {lag:.2f}" for role, lag in sorted(watch.lag_s.items())) or "?")
    print(
        "contained failures:", ", ".join(f"{labels} {count:g}" for labels, count in watch.contained.items()) or "none"
    )
    print("roles started again:", watch.restarts() or "none")
    return not (lost or wrong or watch.restarts())


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long the attacks go on")
    parser.add_argument("--alone", type=float, default=0.0, help="how long the clients are alone first; 0: a tenth")
    parser.add_argument("--seed", type=int, default=0, help="of what happens when; 0: another each time")
    parser.add_argument("--threads", type=int, default=8, help="attacks at a time")
    parser.add_argument("--attacks", help=f"only these, with commas between; there are {', '.join(ATTACKS)}")
    parser.add_argument("--log", type=Path, help="write the server's log to this file")
    options = parser.parse_args()
    names = options.attacks.split(",") if options.attacks else list(ATTACKS)
    if unknown := set(names) - ATTACKS.keys():
        parser.error(f"no such attack: {', '.join(sorted(unknown))}; there are {', '.join(ATTACKS)}")
    seed = options.seed or random.SystemRandom().randrange(1, 1 << 31)
    alone_s = options.alone or max(5.0, options.seconds / 10)
    print(
        f"seed {seed}; alone for {alone_s:g} s, then {options.threads} attackers for {options.seconds:g} s", flush=True
    )
    with tempfile.TemporaryDirectory(prefix="mixed-attack-") as folder:
        write_models(Path(folder))
        more = {"log_file": str(options.log)} if options.log else {}
        with Server(folder, model_control_mode="explicit", load_model=["*"], **more) as server:
            places = {"http": server.http_address, "grpc": server.grpc_url, "nats": server.nats_url, "seed": seed}
            patience_s = TIMEOUT_S + 30.0
            alone = result(started("honest", {**places, "seconds": alone_s}), alone_s + patience_s)
            watch = Watch(server)
            watch.start()
            # The clients go on for a moment after the attacks: what these leave behind must not cost them either.
            honest_s = options.seconds + 5.0
            honest = started("honest", {**places, "seed": seed + 1, "seconds": honest_s})
            attack = {**places, "seconds": options.seconds, "threads": options.threads, "attacks": names}
            attacks = started("attacks", attack)
            began_s = time.monotonic()
            try:
                outcomes = result(attacks, options.seconds + _ATTACK_END_S)
                left_s = honest_s + patience_s - (time.monotonic() - began_s)
                beside = result(honest, max(1.0, left_s) + _ATTACK_END_S)
            finally:
                for process in (attacks, honest):
                    process.kill()
                    process.wait()
                watch.end()
    return 0 if report(alone, beside, outcomes, watch) else 1


if __name__ == "__main__":
    sys.exit(main())

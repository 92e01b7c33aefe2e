"""`FaultReport`: the result of one fault, printed as one line."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from tests.faults.account import Findings


class Skipped(Exception):
    """This machine can't run the fault; the message says why."""


@dataclass
class FaultReport:
    """The result of one fault. `failures` are violated expectations; `skipped` is why the fault can't run here."""

    id: str
    what: str
    requests: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    duplicated: int = 0
    wrong: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    again: int = 0
    waits_s: list[float] = field(default_factory=list, repr=False)
    recoveries_s: list[float] = field(default_factory=list, repr=False)
    rss_bytes: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    skipped: str = ""
    seed: int = 0

    def add(self, findings: Findings, allowed: str = "") -> None:
        """Add the findings of clients; errors are failures unless they match the pattern `allowed`."""
        self.requests += findings.requests
        self.lost += findings.lost
        self.duplicated += findings.duplicated
        self.wrong += findings.wrong
        self.errors += findings.errors
        self.again += findings.again
        self.waits_s += findings.waits_s
        self.failures += findings.notes
        others = {error: n for error, n in findings.errors.items() if not (allowed and re.search(allowed, error))}
        if others:
            self.failures.append(f"errors: {others}")

    def expect(self, condition: bool, otherwise: str) -> None:
        """Record the failure `otherwise` if the condition is false."""
        if not condition:
            self.failures.append(otherwise)

    def rss(self, worst: dict[str, int]) -> None:
        """Record the peak memory of the roles."""
        for role, size in worst.items():
            self.rss_bytes[role] = max(size, self.rss_bytes.get(role, 0))

    @property
    def is_passed(self) -> bool:
        """Whether all expectations held; a skipped fault has not passed."""
        return not (self.skipped or self.failures or self.lost or self.duplicated or self.wrong)

    @property
    def verdict(self) -> str:
        """The result in one word."""
        return "skipped" if self.skipped else "passed" if self.is_passed else "FAILED"

    def figures(self) -> list[str]:
        """Requests, faults, lost, duplicated, wrong, errors, p99, recovery (p50, max), worst memory."""
        waits, recoveries = sorted(self.waits_s), sorted(self.recoveries_s)
        p99 = f"{waits[len(waits) * 99 // 100]:.2f} s" if waits else "–"
        recovery = f"{recoveries[len(recoveries) // 2]:.2f}, {recoveries[-1]:.2f} s" if recoveries else "–"
        rss = ", ".join(f"{role} {size / 2**20:.0f}" for role, size in sorted(self.rss_bytes.items()))
        counts = (self.requests, self.faults.total(), self.lost, self.duplicated, self.wrong, self.errors.total())
        return [*map(str, counts), p99, recovery, rss or "–"]

    def text(self) -> str:
        """The report as one line."""
        if self.skipped:
            return f"{self.id} {self.what}: skipped: {self.skipped}"
        requests, _, lost, duplicated, wrong, errors, p99, recovery, rss = self.figures()
        kinds: dict[str, list[int]] = {}
        for fault, count in self.faults.items():
            kinds.setdefault(fault.partition(" at ")[0], []).append(count)
        faults = ", ".join(
            f"{kind} {sum(counts)}" + (f" at {len(counts)} steps" if len(counts) > 1 else "")
            for kind, counts in kinds.items()
        )
        said = [
            f"{self.id} {self.what}: {self.verdict}",
            f"{requests} requests, {self.faults.total()} faults ({faults})",
            f"lost {lost}, duplicated {duplicated}, wrong {wrong}",
            f"errors {errors}, sent again {self.again}, p99 {p99}, recovery p50, max {recovery}, max RSS MiB {rss}",
            *self.notes,
            f"seed {self.seed}",
            *(f"FAILURE {failure}" for failure in self.failures),
        ]
        return "; ".join(said)

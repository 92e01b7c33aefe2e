"""`Account`: a ledger of requests and results on disk; `check` compares the two afterwards.

A request is recorded before it is sent, and its result when it is known. The check reads only the two files.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.durable.ledger import Ledger, answer_to, payload_of

BLOCK = 64
"""Number of requests recorded per write."""

MOST_NOTES = 4
"""Number of wrong results of a load that a report shows."""


@dataclass
class Findings:
    """Number of requests sent."""

    requests: int = 0
    lost: int = 0
    """Number of requests without a result."""
    duplicated: int = 0
    """Number of requests with more than one result."""
    wrong: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Errors by text."""
    again: int = 0
    """Number of requests resent because the connection was closed without a response."""
    waits_s: list[float] = field(default_factory=list, repr=False)
    notes: list[str] = field(default_factory=list)
    """The first wrong results, in words."""

    def compare(self, got: object, expected: object, what: str) -> None:
        """Count a wrong result of `what`, and note it."""
        if got != expected:
            self.wrong += 1
            if len(self.notes) < MOST_NOTES:
                self.notes.append(f"{what}: {got}, expected {expected}")

    @property
    def p99_s(self) -> float:
        """Percentiles of the time from the first sending of a request to its result."""
        waits = sorted(self.waits_s) or [0.0]
        return waits[len(waits) * 99 // 100]


class Account:
    """A ledger of requests and results on disk. Requests are numbers; their contents follow from the seed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.seed = seed
        self.promised, self.ended = folder / "promised", folder / "ended"
        self.sent = folder / "sent"
        self._ledger = Ledger(self.promised)
        self._sent = self.sent.open("a", buffering=1)
        self._ends = self.ended.open("a", buffering=1)
        self._next = self._written = 0

    def next(self) -> tuple[int, bytes]:
        """Record a new request; returns its number and payload."""
        if self._next == self._written:
            numbers = range(self._written, self._written + BLOCK)
            self._ledger.promise([(number, answer_to(payload_of(self.seed, number))) for number in numbers])
            self._written += BLOCK
        number = self._next
        self._next += 1
        self._sent.write(f"{number}\n")
        return number, payload_of(self.seed, number)

    def end(self, number: int, answer: str, error: str, wait_s: float, again: int) -> None:
        """Record the result of a request: a response or an error."""
        self._ends.write(json.dumps([number, answer, error, round(wait_s, 6), again]) + "\n")

    def close(self) -> None:
        """Close the files."""
        self._ledger.__exit__(None, None, None)
        self._sent.close()
        self._ends.close()


def check(promised: Path, sent: Path, ended: Path) -> Findings:
    """Compare the recorded requests with the recorded results."""
    expected = dict(line.split() for line in promised.read_text().splitlines())
    findings = Findings()
    open_ones = set(sent.read_text().split())
    findings.requests = len(open_ones)
    seen: set[str] = set()
    for line in ended.read_text().splitlines():
        number, answer, error, wait_s, again = json.loads(line)
        name = str(number)
        findings.duplicated += name in seen
        if name not in expected or not error:
            findings.compare(answer, expected.get(name), f"request {name}")
        seen.add(name)
        findings.again += again
        findings.waits_s.append(wait_s)
        if error:
            findings.errors[error] += 1
    findings.lost = len(open_ones - seen)
    return findings

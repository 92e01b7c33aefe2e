"""The attacks by their names, and the server that they attack."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.faults.mixed_attack import wire

ANSWER_S = 20.0
"""How long an attack waits for a response, in seconds."""

ATTACKS: dict[str, Callable[[Target, random.Random], str]] = {}
HEAVY: set[str] = set()


@dataclass(frozen=True)
class Target:
    """The addresses of the server."""

    http: str
    grpc: str
    nats: str

    def ask(self, request: bytes, timeout_s: float = ANSWER_S) -> str:
        """Send `request` over HTTP; returns the outcome."""
        with wire.connected(self.http, timeout_s) as connection:
            connection.sendall(request)
            return wire.answer(connection)


def attack(is_heavy: bool = False) -> Callable[[Callable[[Target, random.Random], str]], Callable[..., str]]:
    """Register a function as an attack, by its name."""

    def enter(function: Callable[[Target, random.Random], str]) -> Callable[..., str]:
        ATTACKS[function.__name__] = function
        if is_heavy:
            HEAVY.add(function.__name__)
        return function

    return enter

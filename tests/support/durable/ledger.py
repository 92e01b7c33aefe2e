"""A ledger of durable requests, written by producers before they send, and the contents of each request.

A request is a number: its payload and its correct output follow from the seed and the number, so that producers keep no
state.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

SMALLEST_BYTES, LARGEST_BYTES = 64, 4096


def payload_of(seed: int, number: int) -> bytes:
    """64 B to 4 KB that no other request has."""
    key = b"%d-%d" % (seed, number)
    size = SMALLEST_BYTES + int.from_bytes(hashlib.blake2b(key, digest_size=4).digest()) % (
        LARGEST_BYTES - SMALLEST_BYTES + 1
    )
    return hashlib.shake_128(key).digest(size)


def answer_to(payload: bytes) -> str:
    """What the model `digest` must say."""
    return hashlib.sha256(payload).hexdigest()


def id_of(number: int) -> str:
    """The id under which it is published."""
    return f"r-{number}"


def number_of(id: str) -> int:
    """The number of an id; -1 where it is none of ours."""
    prefix, _, number = id.partition("-")
    return int(number) if prefix == "r" and number.isdigit() else -1


class Ledger:
    """An append-only file of lines `number answer`; what was `promised` is on disk when that returns."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def promise(self, entries: Sequence[tuple[int, str]]) -> None:
        """Writes down (number, answer) of requests that are sent next."""
        block = "".join(f"{number} {answer}\n" for number, answer in entries).encode()
        if os.write(self._fd, block) != len(block):
            raise OSError("the ledger could not be written")
        os.fsync(self._fd)


def read_ledgers(paths: Sequence[Path]) -> dict[int, bytes]:
    """The answer (as bytes, not as text) that each request is to have."""
    expected: dict[int, bytes] = {}
    for path in paths:
        with path.open() as lines:
            for line in lines:
                number, answer = line.split()
                expected[int(number)] = bytes.fromhex(answer)
    return expected

"""A nats-server whose files may not grow, as on a full disk: it keeps the error until it is started again."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FREE_BYTES = 64 << 10
"""What its files may still grow by."""


@contextmanager
def full_disk(pid: int, folder: Path) -> Iterator[None]:
    """Process `pid` finds no room for more than `FREE_BYTES` in any file of its data folder."""
    largest_bytes = max((path.stat().st_size for path in folder.rglob("*") if path.is_file()), default=0)
    unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (largest_bytes + FREE_BYTES, unlimited[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it was started again
            resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)

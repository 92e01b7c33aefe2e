"""Memory that a flood of small blocks has left behind goes back to the system."""

import sys
from pathlib import Path

import pytest

from weir.runtime.process_memory import return_free_memory


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_blocks_are_returned() -> None:
    blocks = [bytes(bytearray(60_000)) for _ in range(500)]
    last = bytes(60_000)  # keeps the heap from shrinking by itself
    full_bytes = resident_bytes()
    del blocks
    return_free_memory()
    assert resident_bytes() < full_bytes - 25_000_000
    assert last

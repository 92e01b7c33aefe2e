"""What a process takes of its host, as the host itself tells."""

import subprocess
import sys

import psutil

from weir.runtime.processes.usage import process_usage


def test_it_agrees_with_psutil() -> None:
    own = psutil.Process()
    before_s, told, after_s = sum(own.cpu_times()[:4]), process_usage(), sum(own.cpu_times()[:4])
    assert told is not None
    assert before_s <= told["cpu_s"] + 1e-6
    assert told["cpu_s"] <= after_s + 1e-6
    assert 0.5 < told["resident_bytes"] / own.memory_info().rss < 2


def test_children_count_on_request() -> None:
    size = 64 << 20
    child = subprocess.Popen(
        [sys.executable, "-c", f"held = b'x' * {size}; print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdout.readline()
        alone, all_of_them = process_usage(), process_usage(with_children=True)
        assert alone is not None
        assert all_of_them is not None
        assert all_of_them["resident_bytes"] - alone["resident_bytes"] > size
    finally:
        child.stdin.close()
        child.wait(10)
        child.stdout.close()

"""What a process takes of its host, as the host itself tells."""

import subprocess
import sys

import psutil

from weir.runtime.processes.usage import process_usage


def test_it_agrees_with_psutil() -> None:
    told, own = process_usage(), psutil.Process()
    assert told is not None
    times = own.cpu_times()
    spent_s = times.user + times.system + times.children_user + times.children_system
    assert abs(told["cpu_s"] - spent_s) < 1.0
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

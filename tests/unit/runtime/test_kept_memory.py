"""The memory of a freed block serves the next one: the kernel does not have to map and clear it again."""

import os
import subprocess
import sys

PROGRAM = """
import resource, sys
from weir.runtime.process_memory import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "kept":
    keep_freed_memory()
bytes(bytearray(1 << 20))
before = faults()
for _ in range(50):
    body, response = bytearray(1 << 20), bytes(bytearray(1 << 20))
    del body, response
print(faults() - before)
"""


def page_faults(how: str) -> int:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], check=True, capture_output=True, text=True, env=environment
    ).stdout
    return int(output)


def test_blocks_of_a_megabyte_are_kept() -> None:
    kept, default = page_faults("kept"), page_faults("default")
    assert default > 50 * 100, "without it each block is mapped anew, or this test shows nothing"
    assert kept < 2000, "the first blocks alone"

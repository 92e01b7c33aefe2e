"""`is_optimized`: whether the running Python was compiled with profile-guided optimization.

`make install` runs this file with the Python that it is about to use, which has none of Weir's packages yet.
"""

from __future__ import annotations

import sys
import sysconfig

NOTE = (
    "this Python was compiled without optimizations, with which Weir takes a fifth to a third less processor time: "
    "see docs/performance.md, The interpreter"
)


def is_optimized() -> bool:
    """Whether the interpreter is an optimized build. Distributions build theirs so, and some do not show it."""
    arguments = sysconfig.get_config_var("CONFIG_ARGS") or ""
    return sys.base_prefix == "/usr" or "--enable-optimizations" in arguments


if __name__ == "__main__" and not is_optimized():
    print(f"note: {NOTE}")

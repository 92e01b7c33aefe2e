"""Python imports this at the start of each process of the server that `benchmarks.hops` starts: it notes which functions of
Weir are called.

The file that `WEIR_HOPS` names is shared by all processes. Its first byte is the number of the capture: 0 for none. A
process that finds another number writes what it has noted, and begins anew.
"""

import json
import mmap
import os
import sys
import threading
from types import CodeType, FrameType

_FLAG = os.environ.get("WEIR_HOPS", "")


class Probe:
    """Notes functions, in the order of their first calls."""

    def __init__(self, place: str) -> None:
        with open(place, "r+b") as file:
            self._flag = mmap.mmap(file.fileno(), 1)
        self._place = place
        self._capture = 0
        self._seen: dict[CodeType, None] = {}

    def note(self, frame: FrameType, event: str, _argument: object) -> None:
        """The profile function of every thread."""
        capture = self._flag[0]
        if capture != self._capture:
            self._write()
            self._capture = capture
        if capture and event == "call":
            self._seen.setdefault(frame.f_code)

    def _write(self) -> None:
        seen, self._seen = self._seen, {}
        if not seen:
            return
        rows = [(code.co_filename, code.co_qualname) for code in seen]
        with open("/proc/self/cmdline") as file:
            title = file.read()
        with open(f"{self._place}.{self._capture}.{os.getpid()}", "w") as file:
            json.dump({"title": title, "rows": rows}, file)


if _FLAG:
    _probe = Probe(_FLAG)
    threading.setprofile(_probe.note)
    sys.setprofile(_probe.note)

"""`Logger` of `triton_python_backend_utils`: lines in Triton's log format on the process's standard error."""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime


class Logger:
    """Writes to the server's log; verbose messages only where verbose logging is on. Used as a class, never made."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3

    verbose_enabled = False

    @classmethod
    def log(cls, message: str, level: int = INFO) -> None:
        """Logs `message` at one of this class's levels."""
        cls._write(message, level)

    @classmethod
    def log_info(cls, message: str) -> None:
        """Logs `message` at level INFO."""
        cls._write(message, cls.INFO)

    @classmethod
    def log_warn(cls, message: str) -> None:
        """Logs `message` at level WARNING."""
        cls._write(message, cls.WARNING)

    @classmethod
    def log_error(cls, message: str) -> None:
        """Logs `message` at level ERROR."""
        cls._write(message, cls.ERROR)

    @classmethod
    def log_verbose(cls, message: str) -> None:
        """Logs `message` at level VERBOSE."""
        cls._write(message, cls.VERBOSE)

    @classmethod
    def _write(cls, message: str, level: int) -> None:
        if level == cls.VERBOSE and not cls.verbose_enabled:
            return
        # The frame that called the public function.
        caller = sys._getframe(2)
        where = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
        letter = {cls.WARNING: "W", cls.ERROR: "E"}.get(level, "I")
        now = datetime.now(UTC).strftime("%m%d %H:%M:%S.%f")
        # One write a line, so that lines of threads don't mix; quoted, so that a message can't forge another line.
        sys.stderr.write(f"{letter}{now} {os.getpid()} {where}] {json.dumps(str(message), ensure_ascii=False)}\n")
        sys.stderr.flush()

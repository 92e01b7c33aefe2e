"""`Logger` of `triton_python_backend_utils`: writes to the server's log, in its format and by its settings."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from datetime import UTC, datetime
from enum import Enum


class LogLevel(Enum):
    """The level of a message. Numbers do not stand for levels, though `int` gives the number of one, as in Triton."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3

    def __int__(self) -> int:
        return self.value


class Logger:
    """Writes to the server's log; verbose messages only where verbose logging is on.

    Used as a class, never instantiated.
    """

    LogLevel = LogLevel
    INFO, WARNING, ERROR, VERBOSE = LogLevel

    _shown = frozenset({INFO, WARNING, ERROR})
    _format = "default"
    _file = ""
    _fd: int | None = None

    @classmethod
    def configure(cls, *, log_file: str, log_format: str, log_verbose_level: int, **switches: bool) -> None:
        """Applies the server's log settings, which may change while the model runs.

        `switches` are `log_info`, `log_warning` and `log_error`.
        """
        levels = {"log_info": cls.INFO, "log_warning": cls.WARNING, "log_error": cls.ERROR}
        shown = {level for name, level in levels.items() if switches[name]}
        cls._shown = frozenset(shown | ({cls.VERBOSE} if log_verbose_level > 0 else set()))
        cls._format = log_format
        if log_file != cls._file:
            # Each entry is one append to the file, so that entries of several processes don't mix.
            cls._fd = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            cls._file = log_file

    @classmethod
    def log(cls, message: str, level: LogLevel = LogLevel.INFO) -> None:
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
    def _write(cls, message: str, level: LogLevel) -> None:
        if not isinstance(message, str) or not isinstance(level, LogLevel):
            raise TypeError(
                "log(): incompatible function arguments. The following argument types are supported:\n"
                "    1. (message: str, level: LogLevel = <LogLevel.INFO: 0>) -> None\n\n"
                f"Invoked with: {message!r}, {level!r}"
            )
        if level not in cls._shown:
            return
        # The frame that called the public function.
        caller = sys._getframe(2)
        where = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
        cls._put(cls._line(message, level, where))

    @classmethod
    def _put(cls, line: str) -> None:
        # One write per entry, so that entries of threads don't mix; quoted, so that a message can't forge an entry.
        if cls._fd is None:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
        else:
            os.write(cls._fd, line.encode(errors="backslashreplace") + b"\n")

    @classmethod
    def _line(cls, message: str, level: LogLevel, where: str, trace: str = "") -> str:
        now = datetime.now(UTC)
        if cls._format == "json":
            name = {cls.WARNING: "warning", cls.ERROR: "error", cls.VERBOSE: "debug"}.get(level, "info")
            at = now.isoformat(timespec="microseconds")
            entry = {
                "time": at,
                "level": name,
                "role": "model",
                "pid": os.getpid(),
                "logger": where,
                "message": message,
            }
            if trace:
                entry["exception"] = trace
            return json.dumps(entry)
        letter = {cls.WARNING: "W", cls.ERROR: "E"}.get(level, "I")
        iso8601 = cls._format == "ISO8601"
        head = f"{now:%Y-%m-%dT%H:%M:%SZ} {letter}" if iso8601 else f"{letter}{now.astimezone():%m%d %H:%M:%S.%f}"
        is_escaped = os.environ.get("TRITON_SERVER_ESCAPE_LOG_MESSAGES", "1") != "0"
        text = json.dumps(message, ensure_ascii=False) if is_escaped else message
        lines = [f"{head} {os.getpid()} {where}] {text}", *("    " + _printable(line) for line in trace.splitlines())]
        return "\n".join(lines)


def log_exception(message: str, error: BaseException) -> None:
    """Logs an exception of the model, or of this process's own code, with its traceback."""
    if Logger.ERROR not in Logger._shown:
        return
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "-"
    trace = "".join(traceback.format_exception(error)).rstrip("\n")
    Logger._put(Logger._line(message, Logger.ERROR, where, trace))


def log_exceptions_of_threads() -> None:
    """From now on exceptions that end threads of the model are logged by `log_exception`."""

    def log(ended: threading.ExceptHookArgs) -> None:
        if ended.exc_value is not None and not isinstance(ended.exc_value, SystemExit):
            name = ended.thread.name if ended.thread is not None else "unknown"
            log_exception(f"thread '{name}' of the model ended with an exception", ended.exc_value)

    threading.excepthook = log


def _printable(text: str) -> str:
    return "".join(ch if ch.isprintable() else ch.encode("unicode_escape", "backslashreplace").decode() for ch in text)

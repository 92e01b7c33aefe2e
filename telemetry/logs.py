"""One log format for all roles: one entry is one line on stderr that names the role and the process.

Text is Triton's default layout with the role added:

    I0131 12:00:00.000000 4711 gateway http_server.py:88] "Started HTTPService at 127.0.0.1:8000"

JSON is one object a line. Whatever a message holds (a model's name, a client's header), it can't forge an entry or
reach the terminal: quotes, control characters and other unprintable ones are escaped.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

_LETTERS = {logging.DEBUG: "D", logging.INFO: "I", logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "F"}
_OWN_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def configure_logging(role: str, format: str = "default", verbose: int = 0) -> None:
    """Send this process's log to stderr as `role`, replacing earlier handlers.

    `format` is "default" (also called "text") or "json". `verbose` 0 shows informational entries and up, 1 and more
    shows debugging ones too. Python warnings join the log. Fields given as `extra` are kept in JSON. Raises ValueError
    for another format.
    """
    if format not in ("default", "text", "json"):
        raise ValueError(f"log format must be default, text or json, not {format!r}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter(role) if format != "json" else JsonFormatter(role))
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)


class TextFormatter(logging.Formatter):
    """Entries in Triton's default layout; a traceback follows its entry as indented lines."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """`record` as text."""
        time = datetime.fromtimestamp(record.created, UTC).astimezone().strftime("%m%d %H:%M:%S.%f")
        place = f"{record.process} {self._role} {record.filename}:{record.lineno}"
        entry = f"{_LETTERS.get(record.levelno, 'I')}{time} {place}] {_quoted(record.getMessage())}"
        trace = self._trace(record)
        return "\n".join([entry, *("    " + _escaped(line) for line in trace.splitlines())])

    def _trace(self, record: logging.LogRecord) -> str:
        return self.formatException(record.exc_info) if record.exc_info else ""


class JsonFormatter(logging.Formatter):
    """Entries as JSON objects: time (RFC 3339, UTC), level, role, pid, logger, message, and what `extra` held."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """`record` as one line of JSON."""
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "role": self._role,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name, value in record.__dict__.items() if name not in _OWN_FIELDS}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _quoted(message: str) -> str:
    return _escaped(json.dumps(message, ensure_ascii=False))


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(ch if ch.isprintable() else ch.encode("unicode_escape", "backslashreplace").decode() for ch in text)

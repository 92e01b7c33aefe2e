"""One log format for all roles: one entry is one line that names the role and the process.

Entries go to stderr, or to a file that all roles add to. Text is Triton's default layout with the role added, or its
ISO 8601 one:

    I0131 12:00:00.000000 4711 gateway http_server.py:88] "Started HTTPService at 127.0.0.1:8000"
    2026-01-31T12:00:00Z I 4711 gateway http_server.py:88] "Started HTTPService at 127.0.0.1:8000"

JSON is one object a line. Whatever a message holds (a model's name, a client's header), it can't forge an entry or
reach the terminal: quotes, control characters and other unprintable ones are escaped. As with Triton, the variable
TRITON_SERVER_ESCAPE_LOG_MESSAGES=0 has messages of the text layouts written as they are, to the reader's own risk.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime

from schemas.errors import invalid
from telemetry.log_settings import ISO8601, JSON, Changes, LogSettings, unpack_changes

_LETTERS = {logging.DEBUG: "D", logging.INFO: "I", logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "F"}
_OURS = "weir"
_OWN_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class RoleLog:
    """The log of this process. `settings` are those that hold, `changes` what clients have made of the command line's."""

    def __init__(self, role: str, settings: LogSettings) -> None:
        """Sends the process's log where `settings` say, replacing earlier handlers. Raises WeirError for its file."""
        self._role = role
        self._initial = settings
        self.changes: Changes = {}
        self._handler: logging.Handler = logging.StreamHandler(sys.stderr)
        if settings.log_file:
            # Each entry is one write at the end of the file, so those of several roles don't mix.
            try:
                self._handler = logging.FileHandler(settings.log_file, encoding="utf-8", errors="backslashreplace")
            except OSError as error:
                raise invalid(f"--log-file {settings.log_file} can't be written: {error.strerror}") from error
        self._handler.addFilter(self._admits)
        logging.basicConfig(handlers=[self._handler], force=True)
        logging.captureWarnings(True)
        self.apply(settings)

    def apply(self, settings: LogSettings) -> None:
        """From now on these hold; the file stays what it is."""
        global _current
        _current = self.settings = settings
        self._handler.setFormatter(_formatter(self._role, settings.log_format))
        # What is not logged should not be made: the least level that is on is the threshold, the filter does the rest.
        switches = {
            logging.DEBUG: settings.log_verbose_level > 0,
            logging.INFO: settings.log_info,
            logging.WARNING: settings.log_warning,
            logging.ERROR: settings.log_error,
        }
        self._silent = frozenset(level for level, is_on in switches.items() if not is_on)
        least = min((level for level, on in switches.items() if on), default=logging.CRITICAL)
        logging.getLogger(_OURS).setLevel(least)
        # Details of libraries are many (hpack tells of every header): for those who ask for more than ours.
        logging.getLogger().setLevel(least if settings.log_verbose_level > 1 else max(least, logging.INFO))

    def take(self, _model: str, data: bytes) -> None:
        """Applies what clients have changed, as it lies in the bucket of settings (`bus.settings.Apply`)."""
        self.changes = unpack_changes(data) if data else {}
        self.apply(self._initial.changed(self.changes))

    def _admits(self, record: logging.LogRecord) -> bool:
        return record.levelno // 10 * 10 not in self._silent


_current = LogSettings()


def current_settings() -> LogSettings:
    """The settings of this process's log; the very same object until they change. For any thread."""
    return _current


def configure_logging(role: str, settings: LogSettings = LogSettings()) -> RoleLog:  # noqa: B008 - immutable
    """Send this process's log to stderr as `role`, or where and how `settings` say; it replaces earlier handlers.

    Python warnings join the log. Fields given as `extra` are kept in JSON. Raises WeirError for a file that can't be
    written.
    """
    return RoleLog(role, settings)


def _formatter(role: str, format: str) -> logging.Formatter:
    return JsonFormatter(role) if format == JSON else TextFormatter(role, is_iso8601=format == ISO8601)


class TextFormatter(logging.Formatter):
    """Entries in one of Triton's layouts; a traceback follows its entry as indented lines."""

    def __init__(self, role: str, is_iso8601: bool = False) -> None:
        super().__init__()
        self._role = role
        self._is_iso8601 = is_iso8601
        self._is_escaped = os.environ.get("TRITON_SERVER_ESCAPE_LOG_MESSAGES", "1") != "0"

    def format(self, record: logging.LogRecord) -> str:
        """`record` as text."""
        at, letter = datetime.fromtimestamp(record.created, UTC), _LETTERS.get(record.levelno, "I")
        if self._is_iso8601:
            head = f"{at.strftime('%Y-%m-%dT%H:%M:%SZ')} {letter}"
        else:
            head = f"{letter}{at.astimezone().strftime('%m%d %H:%M:%S.%f')}"
        place = f"{record.process} {self._role} {record.filename}:{record.lineno}"
        message = record.getMessage()
        entry = f"{head} {place}] {_quoted(message) if self._is_escaped else message}"
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

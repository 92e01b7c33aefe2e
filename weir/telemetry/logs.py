"""The log of a role: one format for all roles, in which each line names the role and the process.

Entries go to stderr, or to a file that all roles append to. Text is Triton's default layout with the role added, or its
ISO 8601 one:

    I0131 12:00:00.000000 4711 gateway http_server.py:88] "Started HTTPService at 127.0.0.1:8000"
    2026-01-31T12:00:00Z I 4711 gateway http_server.py:88] "Started HTTPService at 127.0.0.1:8000"

JSON is one object a line. A message can not forge an entry or control the terminal, whatever it contains (a model's
name, a client's header): quotes, control characters and other unprintable ones are escaped. As with Triton, the variable
TRITON_SERVER_ESCAPE_LOG_MESSAGES=0 turns this off for the text layouts, at the reader's own risk.

At verbose level 1, `log_request` writes one entry for each step of a request in each role. All of them contain
`<gateway>/<key>`, the name of the request on the bus. The gateway and the worker also know the client's request id. JSON
entries have both as fields, and the model.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime

from weir.schemas.core.errors import invalid
from weir.telemetry.log_settings import ISO8601, JSON, Changes, LogSettings, unpack_changes

_LETTERS = {logging.DEBUG: "D", logging.INFO: "I", logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "F"}
_OWN_LOGGER = "weir"
_LOGS_HEADERS = "hpack"
_OWN_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class RoleLog:
    """The log of this process: the current `settings`, and the `changes` that clients made to the command line's."""

    def __init__(self, role: str, settings: LogSettings) -> None:
        """Sends the process's log where `settings` say, replacing earlier handlers. Raises WeirError for its file."""
        self._role = role
        self._initial = settings
        self.changes: Changes = {}
        self._handler: logging.Handler = logging.StreamHandler(sys.stderr)
        if settings.log_file:
            # Each entry is one write at the end of the file, so those of several roles do not mix.
            try:
                self._handler = logging.FileHandler(settings.log_file, encoding="utf-8", errors="backslashreplace")
            except OSError as error:
                raise invalid(f"--log-file {settings.log_file} can't be written: {error.strerror}") from error
        self._handler.addFilter(self._admits)
        logging.basicConfig(handlers=[self._handler], force=True)
        logging.captureWarnings(True)
        self.apply(settings)

    def apply(self, settings: LogSettings) -> None:
        """Applies these settings; the file stays the same."""
        global _current
        _current = self.settings = settings
        self._handler.setFormatter(_formatter(self._role, settings.log_format))
        # The lowest enabled level is the threshold, so that disabled entries are not created; the filter does the rest.
        switches = {
            logging.DEBUG: settings.log_verbose_level > 0,
            logging.INFO: settings.log_info,
            logging.WARNING: settings.log_warning,
            logging.ERROR: settings.log_error,
        }
        self._silent = frozenset(level for level, is_on in switches.items() if not is_on)
        least = min((level for level, on in switches.items() if on), default=logging.CRITICAL)
        logging.getLogger(_OWN_LOGGER).setLevel(least)
        # Libraries log many details, so theirs need a verbose level above 1.
        logging.getLogger().setLevel(least if settings.log_verbose_level > 1 else max(least, logging.INFO))
        # hpack logs every header of clients with its value, which may be a key or a token.
        logging.getLogger(_LOGS_HEADERS).setLevel(logging.WARNING)

    def take(self, _model: str, data: bytes) -> None:
        """Applies changes by clients, as stored in the bucket of settings (`weir.bus.kv.settings`)."""
        self.changes = unpack_changes(data) if data else {}
        self.apply(self._initial.changed(self.changes))

    def _admits(self, record: logging.LogRecord) -> bool:
        return record.levelno // 10 * 10 not in self._silent


_current = LogSettings()


def current_settings() -> LogSettings:
    """Returns the settings of this process's log; the same object until they change. Thread-safe."""
    return _current


def configure_logging(role: str, settings: LogSettings = LogSettings()) -> RoleLog:  # noqa: B008 - immutable
    """Sends this process's log to stderr as `role`, or as `settings` say; replaces earlier handlers.

    Python warnings join the log. Fields given as `extra` appear in JSON. Raises WeirError if the file can not be
    written.
    """
    return RoleLog(role, settings)


def _formatter(role: str, format: str) -> logging.Formatter:
    return JsonFormatter(role) if format == JSON else TextFormatter(role, is_iso8601=format == ISO8601)


class TextFormatter(logging.Formatter):
    """Formats entries in one of Triton's layouts; a traceback follows its entry as indented lines."""

    def __init__(self, role: str, is_iso8601: bool = False) -> None:
        super().__init__()
        self._role = role
        self._is_iso8601 = is_iso8601
        self._is_escaped = os.environ.get("TRITON_SERVER_ESCAPE_LOG_MESSAGES", "1") != "0"

    def format(self, record: logging.LogRecord) -> str:
        """Returns `record` as text."""
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
    """Formats entries as JSON objects: time (RFC 3339, UTC), level, role, pid, logger, message, and the `extra` fields."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """Returns `record` as one line of JSON."""
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


def logs_requests(logger: logging.Logger) -> bool:
    """Whether there is a log entry for each request."""
    return logger.isEnabledFor(logging.DEBUG)


def log_request(
    logger: logging.Logger, step: str, model: str, request: tuple[str, int], request_id: str | None = None
) -> None:
    """Logs that a request for `model` has reached `step`.

    `request` is its gateway and its key there, `request_id` the client's id, None where it is not known.
    """
    name = f"{request[0]}/{request[1]}"
    fields = {"key": name, "model": model}
    prefix = ""
    if request_id is not None:
        fields["request_id"] = request_id
        prefix = f"[request id: {request_id or '<id_unknown>'}] "
    logger.debug("%s%s, model '%s': %s", prefix, name, model, step, extra=fields, stacklevel=2)

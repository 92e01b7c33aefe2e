"""`AccessLog`: one line of JSON for each request that a gateway has answered, or whose client has disconnected before."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from weir.access.audit import MAX_TEXT, printable
from weir.access.principal import Principal
from weir.telemetry.line_writer import LineWriter

CANCELLED = 499
"""The status of a request of HTTP or NATS whose client has disconnected before the response was complete."""


class AccessEntry(msgspec.Struct, gc=False):
    """The fields of a line, in their order. `time` is in Unix seconds, when the response was complete.

    `route` is the template of the route or of the subject, or the path of the gRPC method; "" for a URL that has no route.
    `model` and `version` are those that the request names. `status` is that of HTTP, or of gRPC. Bytes are those of bodies,
    or of gRPC's messages.
    """

    time: float
    door: str
    method: str
    route: str
    model: str
    version: str
    status: int
    bytes_in: int
    bytes_out: int
    duration_us: int
    principal: str


_GRPC_CANCELLED = 1

_encode_lines = msgspec.json.Encoder().encode_lines


def _lines(entries: Sequence[AccessEntry]) -> bytes:
    for entry in entries:
        for text in (entry.model, entry.route, entry.version, entry.method, entry.principal):
            if len(text) > MAX_TEXT or not text.isprintable():
                _clean(entry)
                break
    return _encode_lines(entries)


def _clean(entry: AccessEntry) -> None:
    entry.route, entry.model = printable(entry.route), printable(entry.model)
    entry.method, entry.version = printable(entry.method), printable(entry.version)
    entry.principal = printable(entry.principal)


class AccessLog:
    """The access log of one process, in the file `path`, "-" for standard output."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._writer: LineWriter[AccessEntry] | None = None

    def open(self) -> None:
        """Opens the file. Raises WeirError (INVALID_ARG) if it can't be written."""
        self._writer = LineWriter("--access-log", self._path, _lines)

    def close(self) -> None:
        """Writes what waits, and closes the file."""
        if self._writer is not None:
            self._writer.close()

    @property
    def dropped(self) -> int:
        """Lines that were dropped: too many waited, or the file could not be written."""
        return 0 if self._writer is None else self._writer.dropped

    def record(  # noqa: PLR0913 - runs for every request: an object for its arguments would cost as much
        self,
        door: str,
        method: str,
        route: str,
        model: str,
        version: str,
        status: int,
        bytes_in: int,
        bytes_out: int,
        began_ns: int,
        principal: Principal,
    ) -> None:
        """Has a line written soon. `began_ns` is the monotonic time at which the request began to arrive."""
        if self._writer is None:
            return
        if (
            len(model) > MAX_TEXT or len(route) > MAX_TEXT or len(version) > MAX_TEXT
        ):  # what waits is bounded in bytes too
            model, route, version = model[: MAX_TEXT + 1], route[: MAX_TEXT + 1], version[: MAX_TEXT + 1]
        duration_us = (time.monotonic_ns() - began_ns) // 1000
        self._writer.put(
            AccessEntry(
                time.time(),
                door,
                method,
                route,
                model,
                version,
                status,
                bytes_in,
                bytes_out,
                duration_us,
                principal.name,
            )
        )


class CallLine:
    """The line of one gRPC call of the method at `path`: CANCELLED unless a status is set before the call is over."""

    __slots__ = ("_began_ns", "_log", "_path", "bytes_in", "bytes_out", "model", "status", "version")

    def __init__(self, log: AccessLog, path: bytes) -> None:
        self._began_ns = time.monotonic_ns()
        self._log = log
        self._path = path
        self.bytes_in = 0
        self.bytes_out = 0
        self.model = ""
        self.status = _GRPC_CANCELLED
        self.version = ""

    def write(self, principal: Principal) -> None:
        """Writes the line: the call is over."""
        self._log.record(
            "grpc",
            "POST",
            self._path.decode("latin-1"),
            self.model,
            self.version,
            int(self.status),
            self.bytes_in,
            self.bytes_out,
            self._began_ns,
            principal,
        )

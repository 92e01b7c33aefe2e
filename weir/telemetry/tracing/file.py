"""Mode "triton": writes traces to JSON files in Triton's format, which its `trace_summary.py` reads.

A file is an array of records: one with the model and the request, one for each timestamp, and the tensors at level
TENSORS. Times are of the monotonic clock. With log frequency N, each N traces make a file `<file>.0`, `<file>.1` and
so on. Otherwise all traces are in `<file>`, which is written when the setting changes, its count is used up, or the
server stops.
"""

from __future__ import annotations

import json
import logging
import os
import time
from itertools import count
from pathlib import Path
from typing import Any

from weir.telemetry.tracing.trace import OWN_TIMESTAMPS, Trace

logger = logging.getLogger("weir.trace")

MAX_UNWRITTEN_BYTES = 4 << 20
"""Traces of one setting that wait to be written; with more of them a file is written early."""

_BEFORE_HEADER = ("HTTP_RECV_START", "HTTP_RECV_END")
_BEFORE_TENSORS = ("REQUEST_START", "QUEUE_START")
_AT_FRONTEND = ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END")


class TraceFile:
    """The output of all settings. If a file can not be written, its traces are lost and the log says so."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._numbers = count()
        self._is_started = False

    def write_numbered(self, records: list[bytes]) -> None:
        """Writes the next numbered file; it appears only when it is complete."""
        path = f"{self.path}.{next(self._numbers)}"
        if self._write(f"{path}.part", "wb", b"[%b]" % b",".join(records)):
            os.replace(f"{path}.part", path)

    def append(self, records: list[bytes]) -> None:
        """Appends to the single file; `close` ends it."""
        text = b",".join(records)
        if self._is_started:
            self._write(self.path, "ab", b"," + text)
        else:
            self._is_started = self._write(self.path, "wb", b"[" + text)

    def close(self) -> None:
        """Ends the single file, if it was started."""
        if self._is_started:
            self._write(self.path, "ab", b"]")
            self._is_started = False

    def _write(self, path: str, mode: str, text: bytes) -> bool:
        try:
            with Path(path).open(mode) as file:
                file.write(text)
            return True
        except OSError as error:
            logger.error("failed to write traces to %s: %s", path, error.strerror)
            return False


class TraceBuffer:
    """The traces of one setting that are not yet in a file."""

    def __init__(self, file: TraceFile, log_frequency: int) -> None:
        self._file = file
        self._log_frequency = log_frequency
        self._records: list[bytes] = []
        self._bytes = 0
        self._traces = 0

    def add(self, trace: Trace) -> None:
        """Adds a complete trace."""
        text = ",".join(json.dumps(record, separators=(",", ":"), ensure_ascii=False) for record in _records(trace))
        self._records.append(text.encode(errors="replace"))
        self._bytes += len(self._records[-1])
        self._traces += 1
        if self._traces == self._log_frequency or self._bytes > MAX_UNWRITTEN_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes the buffered traces."""
        if self._records:
            (self._file.write_numbered if self._log_frequency else self._file.append)(self._records)
        self._records, self._bytes, self._traces = [], 0, 0


def _records(trace: Trace) -> list[dict[str, Any]]:
    """Returns the trace in Triton's format and order: HTTP's first timestamps precede the header, gRPC's follow it."""
    to_monotonic = time.monotonic_ns() - time.time_ns()
    timestamps = [(name, ns + to_monotonic) for name, ns in trace.timestamps if name not in OWN_TIMESTAMPS]

    def stamps(*names: str) -> list[dict[str, Any]]:
        return [{"id": trace.id, "timestamps": [{"name": n, "ns": ns}]} for n, ns in timestamps if n in names]

    header: dict[str, Any] = {
        "id": trace.id,
        "model_name": trace.model_name,
        "model_version": trace.model_version,
    }
    if trace.request_id:
        header["request_id"] = trace.request_id
    tensors = [
        {
            "id": trace.id,
            "activity": tensor.activity,
            "tensor": {"name": tensor.name, "data": tensor.data, "shape": tensor.shape, "dtype": tensor.datatype},
        }
        for tensor in trace.tensors
    ]
    first = (*_BEFORE_HEADER, *_BEFORE_TENSORS, *_AT_FRONTEND)
    rest = [name for name, _ in timestamps if name not in first]
    return [
        *stamps(*_BEFORE_HEADER),
        header,
        *stamps(*_AT_FRONTEND),
        *stamps(*_BEFORE_TENSORS),
        *tensors,
        *stamps(*rest),
    ]

"""`RecordLines`: the header lines of ordinary records: those of requests that succeeded, and were never lost or put off.

What the records of a model have in common is packed once; the rest of a line is known to need no care.
"""

from __future__ import annotations

from bus.headers import pack_headers
from gateway.durable.durable_request import DurableRequest
from schemas.terminal import Outcome

MAX_KEPT = 256
"""Common parts that are remembered."""

_VERSION_LINE = b"NATS/1.0\r\n"

Headers = list[tuple[str, str]]


class RecordLines:
    """See the module."""

    def __init__(self) -> None:
        self._common: dict[tuple[str, str, str, tuple[tuple[str, str], ...]], bytes] = {}

    def of_success(self, request: DurableRequest, version: str, headers: Headers, ended_ms: int) -> bytes | None:
        """The lines of its record and of the answer's `headers`, with the empty one that ends them; the names are those
        of `TerminalRecord`. None for a request that is not an ordinary one.
        """
        if request.responses or request.trials.history:
            return None
        key = (request.model, version, request.terms.tenant, tuple(headers))
        common = self._common.get(key)
        if common is None:
            common = self._pack(*key)
        return (
            b"Weir-Id: %b\r\nWeir-Attempts: %d\r\nWeir-Accepted-Ms: %d\r\nWeir-Ended-Ms: %d\r\nWeir-Digest: %b\r\n%b"
            % (
                request.id.encode(errors="replace"),  # printable: `check_id` has seen it
                request.attempts,
                request.accepted_ms,
                ended_ms,
                request.body_digest().encode(),
                common,
            )
        )

    def _pack(self, model: str, version: str, tenant: str, headers: tuple[tuple[str, str], ...]) -> bytes:
        told = [("Weir-Model", model), ("Weir-Outcome", Outcome.SUCCEEDED.value), ("Weir-Status", "200")]
        told += [("Weir-Model-Version", version)] if version else []
        told += [("Weir-Tenant", tenant)] if tenant else []
        if len(self._common) >= MAX_KEPT:
            self._common.clear()
        key = (model, version, tenant, headers)
        lines = self._common[key] = pack_headers([*told, *headers])[len(_VERSION_LINE) :]
        return lines

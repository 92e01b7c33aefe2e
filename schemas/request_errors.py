"""Refusals that name the request they refuse, as Triton's core does."""

from __future__ import annotations

from schemas.errors import WeirError, invalid


def refused(request_id: str, message: str) -> WeirError:
    """An INVALID_ARG error prefixed with the request's id, `<id_unknown>` for a request without one."""
    return invalid(f"[request id: {request_id or '<id_unknown>'}] {message}")

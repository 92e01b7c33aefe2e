"""What `weir.Server` and its client raise: errors with the code and the message of the server.

The module stands alone, as all that a program imports does: see `weir.own_packages`.
Source: Triton's error codes and their gRPC statuses; `schemas.errors` is the server's side of the same table.
"""

from __future__ import annotations

from enum import Enum


class ErrorCode(Enum):
    """Why a request failed. The value is the number of the gRPC status."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARG = 3
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    UNSUPPORTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14

    @classmethod
    def of_grpc(cls, number: int) -> ErrorCode:
        """The code of gRPC status `number`; UNKNOWN for a status that no answer of a server has."""
        return next((code for code in cls if code.value == number), cls.UNKNOWN)


class WeirError(Exception):
    """A request failed. `code` says how, `message` is the server's; as text, one follows the other."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"

    def __repr__(self) -> str:
        return f"WeirError({self.code.name}, {self.message!r})"


# Tracebacks show the names by which programs import them.
ErrorCode.__module__ = WeirError.__module__ = "weir"

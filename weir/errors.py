"""The errors that `weir.Server`, its client and the commands raise.

Source: Triton's error codes and their gRPC statuses; `weir.schemas.core.errors` is the server's side of the same table.
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
        """The code for gRPC status `number`; UNKNOWN for a status that servers do not send."""
        return next((code for code in cls if code.value == number), cls.UNKNOWN)


class WeirError(Exception):
    """A request failed, with the server's error `code` and `message`."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"

    def __repr__(self) -> str:
        return f"WeirError({self.code.name}, {self.message!r})"


# Tracebacks show the names under which programs import these classes.
ErrorCode.__module__ = WeirError.__module__ = "weir"


class StartError(Exception):
    """A command or server can't start. The message is one line; the command line prints it and exits with status 1.

    For a server started by `weir.Server`, the last lines of the server's log follow the message.
    """

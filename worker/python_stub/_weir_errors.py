"""The errors of a Python model: exceptions that fail a whole batch, and the error of one response."""

from __future__ import annotations


class TritonModelException(Exception):
    """Raised by a model, or by this API where a model violates the contract; fails the whole batch."""


class BackendError(Exception):
    """Raised by Weir's own code in place of a model; the client gets its text and `code`, one of `TritonError`."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class TritonError:
    """The error of one response: a message for the client and one of Triton's eight codes (default INTERNAL).

    RESOURCE_EXHAUSTED is Weir's own: a limit is reached for now, which clients see as status 429. The numbers are those of
    `schemas.core.errors.ErrorCode`.
    """

    UNKNOWN = 1
    INTERNAL = 2
    NOT_FOUND = 3
    INVALID_ARG = 4
    UNAVAILABLE = 5
    UNSUPPORTED = 6
    ALREADY_EXISTS = 7
    CANCELLED = 8
    RESOURCE_EXHAUSTED = 9

    __slots__ = ("_code", "_message")

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        if (
            not isinstance(message, str)
            or not isinstance(code, int)
            or not self.UNKNOWN <= code <= self.RESOURCE_EXHAUSTED
        ):
            raise TypeError(
                "__init__(): incompatible constructor arguments. The following argument types are supported:\n"
                "    1. TritonError(message: str, code: TritonError.__ErrorCode = TritonError.INTERNAL)\n\n"
                f"Invoked with: {message!r}, {code!r}"
            )
        self._message = message
        self._code = code

    def __repr__(self) -> str:
        return f"TritonError({self._message!r}, {self._code})"

    def message(self) -> str:
        """The message for the client."""
        return self._message

    def code(self) -> int:
        """One of the codes of this class."""
        return self._code

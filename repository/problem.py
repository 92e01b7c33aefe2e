"""`ConfigProblem`: what is wrong with a configuration, and in which field.

Rules speak of fields and know no files; whoever has the file adds where the field is (`repository.loading`).
"""

from __future__ import annotations

from schemas.errors import ErrorCode, WeirError


class ConfigProblem(WeirError):
    """An INVALID_ARG error about the field at `field`, a path such as `input[0].dims` ("" for the whole)."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(ErrorCode.INVALID_ARG, message)
        self.field = field

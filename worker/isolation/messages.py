"""The names under which a worker and the process of an isolated instance tell each other things.

They can't be those of a user's: configurations and models have no such characters in names.
"""

from __future__ import annotations

import re

from schemas.errors import ErrorCode, WeirError

INNER = "weir_isolated"
"""The parameter that says in JSON what the process is to load."""

DESCRIBED = "weir_described"
"""The parameter that answers what the model says of itself, in JSON."""

STATE = "\x00state "
"""What stands before the name of an output that is a state."""

RAISED = "\x00"
"""What stands before the message of an error that is the failure of a whole batch, not the answer to a request."""

_TOLD = re.compile("\x00([0-9]+) (.*)\x00", re.DOTALL)


def told_error(error: WeirError) -> str:
    """The error as a text, which others may put into one of their own."""
    return f"\x00{error.code.number} {error.message}\x00"


def error_in(text: str) -> WeirError | None:
    """The error that was told somewhere in a text, None for none."""
    found = _TOLD.search(text)
    return None if found is None else WeirError(ErrorCode.from_number(int(found[1])), found[2])

"""The tie of a server to the Python program that started it: when the program ends, however, the server stops.

Not by the parent-death signal: that comes when the thread ends which started the server, and leaves no time to remove
what the server has made.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from weir.start_error import StartError

PARENT_PID = "WEIR_PARENT_PID"
"""Holds the process id of the program that started this server, if one did."""


@contextlib.contextmanager
def parent_fd() -> Iterator[int | None]:
    """A file descriptor that becomes readable when the program ends; None where there is none.

    Raises StartError when it has ended already.
    """
    # Taken out of the environment: what this server starts is not tied to the program, but to the server.
    text = os.environ.pop(PARENT_PID, None)
    if text is None:
        yield None
        return
    try:
        fd = os.pidfd_open(int(text))
    except ProcessLookupError:
        raise StartError("the program that started this server has ended") from None
    try:
        if os.getppid() != int(text):
            raise StartError("the program that started this server has ended")
        yield fd
    finally:
        os.close(fd)

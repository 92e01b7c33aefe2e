"""`StartError`: a command or a server can't start. `weir.schemas.core.errors` has the error of requests."""

from __future__ import annotations


class StartError(Exception):
    """A command or server can't start. The message is one line; the command line prints it and exits with status 1.

    For a server started by `weir.Server`, the last lines of the server's log follow the message.
    """

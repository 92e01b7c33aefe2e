"""Why a command can't start, in one line."""

from __future__ import annotations


class StartError(Exception):
    """A command can't start. The message is one line for whoever typed it; `main` prints it and exits with 1.

    Where a Python program started the server, the last lines of its log follow.
    """

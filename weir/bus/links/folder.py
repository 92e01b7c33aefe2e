"""The folder of the sockets that processes of one host listen on for links.

It lies in the memory file system that `weir.bus.naming.identity.host` stands for: processes that share memory, and only
those, find each other's sockets. Only its user may enter it, and each end of a link checks the user of the other
(SO_PEERCRED). A socket has a random name, which its process publishes. Source: unix(7).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import struct
from pathlib import Path

from weir.bus.naming.identity import SHARED_MEMORY_DIRECTORY
from weir.runtime.folders.private import private_folder

_FORM = 1
"""The version of the frames. Processes that use another one do not connect."""

SWITCH_VARIABLE = "WEIR_LINKS"
"""The environment variable that, with the value "off", has a process do without links."""

_PREPARING = "new-"
_BACKLOG = 512
_CREDENTIALS = struct.Struct("3i")

_is_address = re.compile(rf"{_FORM}-[0-9a-f]{{16}}").fullmatch


def folder() -> Path:
    """Returns the folder of this user, and creates it.

    Raises OSError if another user could enter it, or if links are switched off.
    """
    if os.environ.get(SWITCH_VARIABLE) == "off":
        raise OSError(f"{SWITCH_VARIABLE} is off")
    return private_folder(SHARED_MEMORY_DIRECTORY / f"weir-links-{os.getuid()}")


def listen() -> tuple[socket.socket, str]:
    """Returns a listening socket and its address for `connect`. Raises OSError."""
    place = folder()
    _remove_abandoned(place)
    address = f"{_FORM}-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        # Renamed once it listens: a socket that refuses connections is taken for abandoned.
        preparing = place / f"{_PREPARING}{address}"
        listener.bind(str(preparing))
        listener.listen(_BACKLOG)
        preparing.rename(place / address)
    except OSError:
        listener.close()
        raise
    return listener, address


def connect(address: str) -> socket.socket:
    """Returns a connection to the process that listens at `address`, at once. Raises OSError if there is none."""
    if not _is_address(address):
        raise OSError(f"{address!r} is not an address of a link of version {_FORM}")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect(str(folder() / address))
        check_user(connection)
    except OSError:
        connection.close()
        raise
    return connection


def remove(address: str) -> None:
    """Removes the socket of a listener that was closed."""
    with contextlib.suppress(OSError):
        (folder() / address).unlink()


def check_user(connection: socket.socket) -> None:
    """Raises OSError if the process at the other end belongs to another user."""
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(content)
    if user != os.getuid():
        raise OSError(f"the process at the other end belongs to user {user}")


def _remove_abandoned(place: Path) -> None:
    """Removes the sockets of processes that were killed."""
    for path in place.iterdir():
        if not _is_address(path.name):
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                with contextlib.suppress(OSError):
                    path.unlink()
            except OSError:
                pass  # it is busy, or has just been removed

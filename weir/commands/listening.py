"""`listen_problem`: whether this process could listen at an address now."""

from __future__ import annotations

import errno
import socket

IN_USE = "the port is in use"


def listen_problem(address: str, port: int, shares: bool = False) -> str:
    """Why nothing can listen at `address` and TCP port `port` now; "" if it can. `IN_USE` if another socket does.

    With `shares` other servers on the same port are allowed (SO_REUSEPORT). The socket is closed again.
    """
    try:
        family, kind, number, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, number) as probe:
            # As servers do, so that recently closed connections don't count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind(place)
    except OSError as error:
        return IN_USE if error.errno == errno.EADDRINUSE else error.strerror or str(error)
    return ""

"""A role's ties to what started it: ready line and lifeline of its supervisor, heartbeat file, systemd's messages.

A role that runs without a supervisor (in a container, or by hand) has no ties, and these functions do nothing.

Ready line: the role writes one line of JSON to the pipe whose number is in `WEIR_READY_FD`, `{"ready": true,
...facts}` or `{"error": "one line"}`. Lifeline: the pipe whose number is in `WEIR_LIFELINE_FD` reaches its end when
the supervisor has ended, for any reason.

Heartbeat file: if `WEIR_ALIVE_FILE` names a file, a ready role touches it each second from its event loop. So a
container's health check (of the images, or a probe of Kubernetes) sees by the file's age that the role has started
and that its loop runs, without starting an interpreter.

systemd: a process that systemd started as a service of type `notify` sends READY=1 to its socket when it serves, and, if it
has an event loop and the service has a watchdog, WATCHDOG=1 with each heartbeat.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line imports this, too, and has no event loop
    import asyncio

logger = logging.getLogger("weir.runtime")

READY_FD = "WEIR_READY_FD"
LIFELINE_FD = "WEIR_LIFELINE_FD"
ALIVE_FILE = "WEIR_ALIVE_FILE"

NOTIFY_SOCKET, WATCHDOG_TIMEOUT = "NOTIFY_SOCKET", "WATCHDOG_USEC"
"""systemd's variables (sd_notify(3), sd_watchdog_enabled(3))."""

HEARTBEAT_INTERVAL_S = 1.0
"""Time between two heartbeats."""


def announce_ready(**facts: object) -> None:
    """Reports to the supervisor, or to systemd, that this role serves, and starts its heartbeats.

    Only the first call has an effect. `facts` are JSON values for the start-up block and for a restart: a gateway's are
    `http_port`, `grpc_port`, `metrics_port`, `models` (a list of `{"name", "versions", "state", "reason"}`) and
    `durability` (`{"ack_is_fsync", "reason"}`).
    """
    is_supervised = _announce({"ready": True, **facts})
    # Removed, like the ties: a model's own processes are not the role.
    path = os.environ.pop(ALIVE_FILE, "")
    address = os.environ.pop(NOTIFY_SOCKET, "")
    is_watched = bool(os.environ.pop(WATCHDOG_TIMEOUT, ""))
    if is_supervised:
        address = ""  # the service is the supervisor
    if address:
        _notify(address, b"READY=1")
    if path or (address and is_watched):
        import asyncio

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # the supervisor has no event loop; its roles have heartbeats
        _beat(loop, path, address if is_watched else "")


def announce_failure(message: str) -> None:
    """Reports to the supervisor in one line why this role can not start: a port in use, a missing repository."""
    _announce({"error": " ".join(message.split())})


def watch_parent() -> None:
    """Ends this process at once (status 1) when its supervisor has ended. Call it early in a role's start."""
    fd = _take_fd(LIFELINE_FD)
    if fd is not None:
        threading.Thread(target=_exit_at_end, args=(fd,), name="lifeline", daemon=True).start()


def _beat(loop: asyncio.AbstractEventLoop, path: str, address: str) -> None:
    # A timer, not a task: it ends with the loop and stops when the loop hangs.
    if path:
        try:
            with open(path, "ab"):
                os.utime(path)
        except OSError as error:
            logger.warning("heartbeat file %s can not be touched: %s", path, error.strerror or error)
    if address:
        _notify(address, b"WATCHDOG=1")
    loop.call_later(HEARTBEAT_INTERVAL_S, _beat, loop, path, address)


def _notify(address: str, message: bytes) -> None:
    """Sends a message to systemd at the socket `address`; `@` stands for an abstract one."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as datagrams:
            datagrams.sendto(message, "\0" + address[1:] if address.startswith("@") else address)
    except OSError as error:
        logger.warning("systemd can not be reached at %s: %s", address, error.strerror or error)


def _announce(line: dict[str, object]) -> bool:
    """Writes the line to the supervisor; returns whether there is one."""
    fd = _take_fd(READY_FD)
    if fd is None:
        return False
    with os.fdopen(fd, "wb") as pipe:
        pipe.write(json.dumps(line).encode() + b"\n")
    return True


def _take_fd(variable: str) -> int | None:
    # Removed from the environment and not inheritable, so that processes of the role (user code) never hold it.
    text = os.environ.pop(variable, None)
    if text is None:
        return None
    fd = int(text)
    os.set_inheritable(fd, False)
    return fd


def _exit_at_end(fd: int) -> None:
    while os.read(fd, 1):
        pass
    # Not sys.exit: no hanging or user code may keep an orphaned process alive.
    os._exit(1)

"""A role's ties to the supervisor that started it: its ready line, the lifeline, and the heartbeat file.

A role that runs without a supervisor (in a container, or by hand) has no ties, and these functions do nothing.

Ready line: the role writes one line of JSON to the pipe whose number is in `WEIR_READY_FD`, `{"ready": true,
...facts}` or `{"error": "one line"}`. Lifeline: the pipe whose number is in `WEIR_LIFELINE_FD` reaches its end when
the supervisor has ended, for any reason.

Heartbeat file: if `WEIR_ALIVE_FILE` names a file, a ready role touches it each second from its event loop. So a
container's health check (of the images, or a probe of Kubernetes) sees by the file's age that the role has started
and that its loop runs, without starting an interpreter.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line imports this, too, and has no event loop
    import asyncio

logger = logging.getLogger("weir.runtime")

READY_FD = "WEIR_READY_FD"
LIFELINE_FD = "WEIR_LIFELINE_FD"
ALIVE_FILE = "WEIR_ALIVE_FILE"

HEARTBEAT_INTERVAL_S = 1.0
"""Time between two touches of the heartbeat file."""


def announce_ready(**facts: object) -> None:
    """Reports to the supervisor that this role serves, and starts the heartbeat file. Only the first call has an effect.

    `facts` are JSON values for the start-up block and for a restart: a gateway's are `http_port`, `grpc_port`,
    `metrics_port`, `models` (a list of `{"name", "versions", "state", "reason"}`) and `durability` (`{"ack_is_fsync",
    "reason"}`).
    """
    _announce({"ready": True, **facts})
    path = os.environ.pop(ALIVE_FILE, "")  # removed, like the ties: a model's own processes are not the role
    if path:
        import asyncio

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # the supervisor has no event loop; its roles have heartbeats
        _touch_heartbeat_file(loop, path)


def announce_failure(message: str) -> None:
    """Reports to the supervisor in one line why this role can not start: a port in use, a missing repository."""
    _announce({"error": " ".join(message.split())})


def watch_parent() -> None:
    """Ends this process at once (status 1) when its supervisor has ended. Call it early in a role's start."""
    fd = _take_fd(LIFELINE_FD)
    if fd is not None:
        threading.Thread(target=_exit_at_end, args=(fd,), name="lifeline", daemon=True).start()


def _touch_heartbeat_file(loop: asyncio.AbstractEventLoop, path: str) -> None:
    # A timer, not a task: it ends with the loop and stops when the loop hangs.
    try:
        with open(path, "ab"):
            os.utime(path)
    except OSError as error:
        logger.warning("heartbeat file %s can not be touched: %s", path, error.strerror or error)
    loop.call_later(HEARTBEAT_INTERVAL_S, _touch_heartbeat_file, loop, path)


def _announce(line: dict[str, object]) -> None:
    fd = _take_fd(READY_FD)
    if fd is None:
        return
    with os.fdopen(fd, "wb") as pipe:
        pipe.write(json.dumps(line).encode() + b"\n")


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

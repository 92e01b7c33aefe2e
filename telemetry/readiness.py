"""A role's side of the ties to the supervisor that started it: the ready line, and the lifeline; and its sign of life.

A role that runs alone (in a container, or by hand) has no such ties, and every function here then does nothing.

Ready line: the pipe whose number is in `WEIR_READY_FD` takes one line of JSON, `{"ready": true, ...facts}` or
`{"error": "one line"}`. Lifeline: the pipe whose number is in `WEIR_LIFELINE_FD` reads as ended once the supervisor is
gone, however it went.

Sign of life: where `WEIR_ALIVE_FILE` names a file, a role that is ready touches it each second from its event loop. So
whoever minds containers (the images' health check, a probe of Kubernetes) sees by the file's age that the role has
started and that its loop goes round, and starts no interpreter to see it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line tells that it is ready too, and has no event loop
    import asyncio

logger = logging.getLogger("weir.telemetry")

READY_FD = "WEIR_READY_FD"
LIFELINE_FD = "WEIR_LIFELINE_FD"
ALIVE_FILE = "WEIR_ALIVE_FILE"

ALIVE_INTERVAL_S = 1.0
"""Time between two signs of life."""


def announce_ready(**facts: object) -> None:
    """Tell the supervisor that this role serves, and begin with signs of life. Only a process's first announcement counts.

    `facts` are JSON values for the start-up block and for a restart: a gateway's are `http_port`, `grpc_port`,
    `metrics_port`, `models` (a list of `{"name", "versions", "state", "reason"}`) and `durability` (`{"ack_is_fsync",
    "reason"}`).
    """
    _announce({"ready": True, **facts})
    path = os.environ.pop(ALIVE_FILE, "")  # taken out, as the ties are: a model's own processes are not the role
    if path:
        import asyncio

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # the supervisor: its roles show that they live
        _show_life(loop, path)


def announce_failure(message: str) -> None:
    """Tell the supervisor in one line why this role can't start: a taken port, a missing repository."""
    _announce({"error": " ".join(message.split())})


def watch_parent() -> None:
    """End this process at once (status 1) when its supervisor is gone. Call it early in a role's start."""
    fd = _take_fd(LIFELINE_FD)
    if fd is not None:
        threading.Thread(target=_exit_at_end, args=(fd,), name="lifeline", daemon=True).start()


def _show_life(loop: asyncio.AbstractEventLoop, path: str) -> None:
    # By a timer and not by a task: it ends with the loop, and stands still when the loop does.
    try:
        with open(path, "ab"):
            os.utime(path)
    except OSError as error:
        logger.warning("%s can't be touched: %s", path, error.strerror or error)
    loop.call_later(ALIVE_INTERVAL_S, _show_life, loop, path)


def _announce(line: dict[str, object]) -> None:
    fd = _take_fd(READY_FD)
    if fd is None:
        return
    with os.fdopen(fd, "wb") as pipe:
        pipe.write(json.dumps(line).encode() + b"\n")


def _take_fd(variable: str) -> int | None:
    # Taken out of the environment and marked, so that what a role starts itself (user code) never holds it.
    text = os.environ.pop(variable, None)
    if text is None:
        return None
    fd = int(text)
    os.set_inheritable(fd, False)
    return fd


def _exit_at_end(fd: int) -> None:
    while os.read(fd, 1):
        pass
    # Not sys.exit: nothing that hangs, and no user code, may keep an orphan alive.
    os._exit(1)

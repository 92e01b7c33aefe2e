"""`ForkedRole`: a role that is forked off the supervisor, which has imported what all roles are made of.

To import it takes each role most of a second. Forked, a role is up in some hundredths, when the server starts and when
one that died comes back; and what all have imported lies in memory once.

What is in the child of its parent's is closed and reset first, so that it is as a command would find itself. It never
returns into the parent's code: it ends here.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module

from setproctitle import setproctitle

from bus.parent_death import dies_with_parent

_ROLES = ("scheduler", "worker", "gateway")


def import_roles() -> None:
    """Imports what forked roles will need. It lives for ever, so the garbage collector is not to look through it again."""
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]  # as -P does: what lies in the current folder must not be imported in place of our packages
    gc.disable()
    for role in _ROLES:
        import_module(f"{role}.main")
    gc.freeze()
    gc.enable()


class ForkedRole:
    """A child that runs `main(words)`: of `subprocess.Popen` it has what the supervisor uses. Raises OSError.

    `kept_fds` stay open in it, besides the standard ones; `title` is what the host's list of processes shows.
    """

    def __init__(
        self,
        main: Callable[[Sequence[str]], None],
        words: Sequence[str],
        environment: Mapping[str, str],
        kept_fds: Collection[int],
        title: str,
    ) -> None:
        ask_kernel = dies_with_parent()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.setsid()
                ask_kernel()
                setproctitle(title)  # finds where it is to be written by the environment as it was at the start
                _forget_parent(environment, kept_fds)
                status = _status_of(main, words)
            finally:
                # Not sys.exit: what the parent wants done at its own end is not to be done here.
                os._exit(status)

    def wait(self) -> int:
        """Waits for its end; returns the exit status, or the negative number of the signal that killed it."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def terminate(self) -> None:
        """Tells it to end."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)  # the process is there until `wait` has returned


def _forget_parent(environment: Mapping[str, str], kept_fds: Collection[int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    for handler in list(logging.getLogger().handlers):
        logging.getLogger().removeHandler(handler)
        handler.close()  # now: later its descriptor may be something else's
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    start = 3
    for fd in sorted(kept_fds):
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)


def _status_of(main: Callable[[Sequence[str]], None], words: Sequence[str]) -> int:
    try:
        main(words)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the interpreter would print it and end so too
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0

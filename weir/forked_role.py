"""`ForkedRole`: a role that is forked off the supervisor, which has imported what all roles are made of.

To import it takes each role most of a second. Forked, a role is up in some hundredths, when the server starts and when
one that died comes back; and what all have imported lies in memory once.

What is in the child of its parent's is closed and reset first, so that it is as a command would find itself. It never
returns into the parent's code: it ends here, after what it has registered with `atexit`. Threads that still run are not
waited for.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import signal
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from typing import NoReturn

from setproctitle import setproctitle

from bus.parent_death import dies_with_parent

_ROLES = ("scheduler", "worker", "gateway")
_ENDS = (signal.SIGTERM, signal.SIGINT)


def import_roles() -> None:
    """Imports what forked roles will need. It lives for ever, so the garbage collector is not to look through it again."""
    # As -P does: what lies in the current folder, or beside the script, must not be imported in place of our packages.
    if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd(), os.path.dirname(os.path.realpath(sys.argv[0]))):
        del sys.path[0]
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
        _flush()
        # A signal that comes while the handlers in the child are still ours would be lost to it, and told to us.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _live(main, words, environment, kept_fds, title, ask_kernel, blocked)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

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


def _live(
    main: Callable[[Sequence[str]], None],
    words: Sequence[str],
    environment: Mapping[str, str],
    kept_fds: Collection[int],
    title: str,
    ask_kernel: Callable[[], None],
    signal_mask: Collection[int],
) -> NoReturn:
    """The whole life of the child."""
    status = 1
    try:
        os.setsid()
        ask_kernel()
        setproctitle(title)  # finds where it is to be written by the environment as it was at the start
        _forget_parent(environment, kept_fds)
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        sys.argv[1:] = words
        main(words)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the interpreter would print it and end so too
        sys.excepthook(*sys.exc_info())
    finally:
        # Not sys.exit, which would go on in the parent's code.
        try:
            atexit._run_exitfuncs()
            _flush()
        finally:
            os._exit(status)


def _forget_parent(environment: Mapping[str, str], kept_fds: Collection[int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in _ENDS:
        signal.signal(number, signal.SIG_DFL)
    # What the parent removes at its end, as a temporary folder, is not to be removed at ours.
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    for handler in list(logging.getLogger().handlers):
        logging.getLogger().removeHandler(handler)
        handler.close()  # now: later its descriptor may be something else's
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    # Those that are open, not all that may be: where the limit is none, that are a thousand million.
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept_fds:
            with contextlib.suppress(OSError):  # the listing's own has gone
                os.close(fd)
    os.environ.clear()
    os.environ.update(environment)


def _flush() -> None:
    """What is written is gone before there are two of it. There may be no such file, or nobody who reads it any more."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()

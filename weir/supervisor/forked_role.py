"""`ForkedRole`: a role in a fork of the supervisor, which has imported the code of the role.

Importing the code of all roles takes some tenths of a second. A forked role starts in some hundredths of a second, also
at a restart, and the imported code is shared in memory.

The child first closes and resets what it inherited, so that it runs as a new command would. It never returns into the
parent's code: it exits here, after its `atexit` handlers. It does not wait for running threads.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import logging
import os
import signal
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib import import_module
from typing import NoReturn

from setproctitle import setproctitle

from weir.runtime.child_processes import dies_with_parent

_ROLES = ("worker", "scheduler", "durable", "gateway", "console")
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def import_roles(roles: Sequence[str] = _ROLES) -> None:
    """Import the code of `roles`, and build its decoders of messages. Later calls do only what is missing."""
    with importing():
        for role in roles:
            import_module(f"weir.{role}.main")
        import_module("weir.schemas.wire.codec").build_decoders()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import Weir's packages in this block. Modules are never freed, so the garbage collector need not scan them again."""
    _leave_current_folder()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@functools.cache
def _leave_current_folder() -> None:
    # As -P does: modules in the current folder, or beside the script, must not replace what Weir imports. Once only: then
    # the first entry is another one.
    if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd(), os.path.dirname(os.path.realpath(sys.argv[0]))):
        del sys.path[0]


class ForkedRole:
    """A forked child that runs `main(arguments)`, with the part of `subprocess.Popen` that the supervisor uses.

    `kept_fds` stay open in the child besides the standard streams; `title` is its process title. Raises OSError.
    """

    def __init__(
        self,
        main: Callable[[Sequence[str]], None],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        kept_fds: Collection[int],
        title: str,
    ) -> None:
        die_with_parent = dies_with_parent()

        def run() -> None:
            os.setsid()
            die_with_parent()
            setproctitle(title)  # needs the original environment to locate the title in memory
            _reset_inherited(environment, kept_fds)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            sys.argv[1:] = arguments
            main(arguments)

        _flush()
        # A signal to the child before it resets the inherited handlers would be reported to this process instead.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _run_child(run)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def wait(self) -> int:
        """Wait for its exit; returns the exit status, or the negative number of the signal that killed it."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)  # the process id stays valid until `wait` returns


def _run_child(run: Callable[[], None]) -> NoReturn:
    """Call `run` and exit as the interpreter would; never returns."""
    status = 1
    try:
        run()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does: print it, exit with status 1
        sys.excepthook(*sys.exc_info())
    finally:
        # Not sys.exit, which would unwind into the parent's code.
        try:
            atexit._run_exitfuncs()
            _flush()
        finally:
            os._exit(status)


def _reset_inherited(environment: Mapping[str, str], kept_fds: Collection[int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    # The parent's finalizers, e.g. of temporary folders, must not run in the child.
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    for handler in list(logging.getLogger().handlers):
        logging.getLogger().removeHandler(handler)
        handler.close()  # closed now: later its descriptor may belong to another file
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    # Only open descriptors: without a limit there are a thousand million possible ones.
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept_fds:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed already
                os.close(fd)
    os.environ.clear()
    os.environ.update(environment)


def _flush() -> None:
    """Flush the standard streams, so that buffered output is not written twice. They may be missing or closed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()

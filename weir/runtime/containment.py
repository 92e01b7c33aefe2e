"""What a role does on an exception that its code does not foresee: it ends one request, and nothing else.

Many callbacks serve several requests at once: a bus message carries the responses of a whole batch, a read from a socket
carries several pipelined requests, a turn of the scheduler dispatches all models. An exception that escapes from the part
that belongs to one request would take the others with it, and often their connection, the task group, and the role.

So the function that does one request's part is marked with `contained`: where the part comes in, not what it calls then.
Callbacks of messages, listeners (`call_each`), and timers of a role (`weir.runtime.role_life`) need no mark. If it raises,
then

1. it is counted for `failures()`, which is the metric `weir_contained_failures_total`, and its traceback is logged, at
   most once a second for each site, unless the function of step 2 does so (`is_logged=False`);
2. the method named by `on_error`, if there is one, ends that request with an error;
3. the caller goes on with the next request, as if the function had returned.

Expected errors (`WeirError`, `MalformedMessage`, a lost connection) are not handled by this module: code that knows what
they mean handles them first. `BaseException`s that are no `Exception` (cancellation, exit) always pass.

All marked functions are listed in `SITES`, once their modules are imported: tests raise at each of them.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from weir.runtime.log_limiter import LogLimiter

logger = logging.getLogger("weir.runtime")

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Site:
    """One function that does one request's part of a callback. `function` is what is called; tests replace it."""

    __slots__ = ("failures", "function", "is_logged", "name", "on_error")

    def __init__(self, name: str, function: Callable[..., Any], on_error: str, is_logged: bool) -> None:
        self.name = name
        self.function = function
        self.on_error = on_error
        self.is_logged = is_logged
        self.failures = 0

    def failed(self, error: Exception, arguments: tuple[Any, ...]) -> Any:
        """Reports `error`, and calls the `on_error` method of the first argument with the error and the other arguments."""
        self.failures += 1
        if self.is_logged:
            _log(self.name, error)
        if not self.on_error:
            return None
        try:
            return getattr(arguments[0], self.on_error)(error, *arguments[1:])
        except Exception as second:
            _log(f"{self.name} (ending the request)", second)
            return None


SITES: dict[str, Site] = {}
"""By name, which is the module and the qualified name of the function:
"weir.calls.dispatch:RequestDispatcher._take_response"."""

_reported: dict[str, int] = {}
_limiter = LogLimiter(logger)


def contained(
    on_error: str = "", passes: tuple[type[Exception], ...] = (), is_logged: bool = True
) -> Callable[[_Function], _Function]:
    """Marks a function, or coroutine function, that does one request's part; it then never raises an `Exception`.

    `on_error` names a method of the same object. It is called with the exception and the function's own positional
    arguments, its result is returned in place of the function's, and it must not await. Without it None is returned.
    Exceptions of the types in `passes` are raised as ever. With `is_logged` False, the method logs the exception.
    """

    def mark(function: _Function) -> _Function:
        site = Site(f"{function.__module__}:{function.__qualname__}", function, on_error, is_logged)
        SITES[site.name] = site

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def contain_async(*arguments: Any, **named: Any) -> Any:
                try:
                    return await site.function(*arguments, **named)
                except passes:
                    raise
                except Exception as error:
                    return site.failed(error, arguments)

            return contain_async  # type: ignore[return-value]

        @functools.wraps(function)
        def contain(*arguments: Any, **named: Any) -> Any:
            try:
                return site.function(*arguments, **named)
            except passes:
                raise
            except Exception as error:
                return site.failed(error, arguments)

        return contain  # type: ignore[return-value]

    return mark


def report(place: str, error: Exception) -> None:
    """Logs and counts an unexpected exception that was caught by hand, where `contained` does not fit.

    `place` is a constant text that names the code: "weir.bus.nats.protocol: dispatching a message".
    """
    _reported[place] = _reported.get(place, 0) + 1
    _log(place, error)


def call_each(place: str, listeners: Iterable[Callable[..., object]], *arguments: object) -> None:
    """Calls every listener with `arguments`. One that raises is reported under `place`, and the others are called."""
    for listener in listeners:
        try:
            listener(*arguments)
        except Exception as error:
            report(place, error)


def failures() -> dict[str, int]:
    """How many unexpected exceptions this process has contained, by site or place. Without those that had none."""
    return {**{name: site.failures for name, site in SITES.items() if site.failures}, **_reported}


def _log(place: str, error: Exception) -> None:
    cause = f"{place} {type(error).__name__}"
    _limiter.log(
        logging.ERROR, cause, "unexpected %s at %s: its request ends with an error, others go on: %s",
        type(error).__name__, place, error, exc_info=error,
    )  # fmt: skip

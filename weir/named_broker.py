"""`NamedBroker`: the NATS servers that a command line names, for commands that look at a running cluster and end."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer

from bus.broker_access import NO_ACCESS, BrokerAccess
from weir import NATS_URL_VARIABLE
from weir.options.broker_options import ACCESS_OPTIONS
from weir.start_error import StartError


class NamedBroker(NamedTuple):
    """Where it is ("": that was not said), and how it is spoken to."""

    url: str
    access: BrokerAccess = NO_ACCESS

    @asynccontextmanager
    async def connected(self, name: str, patience_s: float = 10.0) -> AsyncIterator[Any]:
        """A `Bus`, as user "admin". Raises OSError where nobody answers within `patience_s`."""
        import asyncio

        from bus.connection import Bus

        async with asyncio.TaskGroup() as background:
            bus = await Bus.connect(self.url, name, background, patience_s, self.access)
            try:
                yield bus
            finally:
                await bus.close()


@contextmanager
def out_of_groups(*kinds: type[BaseException]) -> Iterator[None]:
    """Raises the first of these errors as itself where task groups have put it into a group of its like.

    Not by `except*`, which some releases of Python 3.11 let put what is raised there into a group again.
    """
    try:
        yield
    except BaseExceptionGroup as errors:
        if errors.split(kinds)[1] is not None:
            raise
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


def asks_broker(command: Callable[..., None]) -> Callable[..., None]:
    """A command of typer's with the options that name the broker, which it gets as its argument `broker`."""
    return _with_broker_options(command, "")


def asks_some_broker(default: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The same for a command that finds a server itself where none is named; `default` says which."""
    return functools.partial(_with_broker_options, default=default)


def _with_broker_options(command: Callable[..., None], default: str) -> Callable[..., None]:
    told = "The NATS server." + (f" Without: {default}." if default else "")
    described = {
        "nats": typer.Option("--nats", envvar=NATS_URL_VARIABLE, metavar="URL", help=told),
        **{
            option.key.replace("-", "_"): typer.Option(
                *option.names, envvar=option.environment, metavar=option.value.metavar, help=option.help
            )
            for option in ACCESS_OPTIONS
        },
    }
    hints = get_type_hints(command, include_extras=True)

    @functools.wraps(command)
    def typed(**values: Any) -> None:
        asked = {key: values.pop(key) for key in described}
        if not asked["nats"] and not default:
            raise StartError("--nats must be specified")
        command(**values, broker=NamedBroker(asked["nats"] or "", BrokerAccess.of(asked)))

    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "broker"
    ]
    added = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option])
        for key, option in described.items()
    ]
    typed.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    typed.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
    del typed.__wrapped__  # typer would look there for what the options are
    return typed

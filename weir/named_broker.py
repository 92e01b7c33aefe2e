"""`NamedBroker`: the NATS servers that a command line names, for commands that look at a running cluster and end."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer

from bus.broker_access import BrokerAccess
from weir import NATS_URL_VARIABLE
from weir.options.broker_options import ACCESS_OPTIONS
from weir.start_error import StartError


class NamedBroker(NamedTuple):
    """Where it is, and how it is spoken to."""

    url: str
    access: BrokerAccess

    @asynccontextmanager
    async def connected(self, name: str) -> AsyncIterator[Any]:
        """A `Bus`, as user "admin". Raises OSError."""
        import asyncio

        from bus.connection import Bus

        async with asyncio.TaskGroup() as background:
            bus = await Bus.connect(self.url, name, background, access=self.access)
            try:
                yield bus
            finally:
                await bus.close()


def first_of(errors: BaseExceptionGroup[Any]) -> BaseException:
    """The first error of a group, however deep."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def asks_broker(command: Callable[..., None]) -> Callable[..., None]:
    """A command of typer's with the options that name the broker, which it gets as its argument `broker`."""
    described = {
        "nats": typer.Option("--nats", envvar=NATS_URL_VARIABLE, metavar="URL", help="The NATS server."),
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
        if not asked["nats"]:
            raise StartError("--nats must be specified")
        command(**values, broker=NamedBroker(asked["nats"], BrokerAccess.of(asked)))

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

"""`NamedBroker`: the NATS servers that a command talks to: those it was given, else those of the local server."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, get_type_hints

import typer

from bus.broker_access import NO_ACCESS, BrokerAccess
from weir import NATS_URL_VARIABLE
from weir.local_servers import DEFAULT_NATS_URL, access_to, none_found_hint, only_local_server
from weir.options.broker_options import ACCESS_OPTIONS


class NamedBroker(NamedTuple):
    """Where it is, and how it is spoken to. `hint` is what to say as well where nobody answers there."""

    url: str
    access: BrokerAccess = NO_ACCESS
    hint: str = ""

    @classmethod
    def choose(cls, url: str | None, data_dir: Path | None, access: BrokerAccess) -> Self:
        """The one at `url`; without a URL that of the only local server (which a line on stderr names), else the default.

        Raises UsageError where several local servers run.
        """
        if url and data_dir is None:
            return cls(url, access_to(url, access))
        server = only_local_server(data_dir, "--nats URL")
        if server is None:
            return cls(DEFAULT_NATS_URL, access, f"{none_found_hint(DEFAULT_NATS_URL)}--nats URL.")
        if data_dir is None:
            typer.echo(f"server found on this machine: {server}", err=True)
        return cls(server.nats_url, server.access(access))

    @asynccontextmanager
    async def connected(self, name: str, patience_s: float = 10.0) -> AsyncIterator[Any]:
        """A `Bus`, as user "admin". Raises OSError where nobody answers within `patience_s`."""
        import asyncio

        from bus.connection import Bus

        async with asyncio.TaskGroup() as background:
            try:
                bus = await Bus.connect(self.url, name, background, patience_s, self.access)
            except OSError as error:
                if not self.hint:
                    raise
                raise ConnectionError(f"{error}. {self.hint}") from error
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
    described: dict[str, tuple[type, Any]] = {
        "nats": (
            str,
            typer.Option(
                "--nats",
                envvar=NATS_URL_VARIABLE,
                metavar="URL",
                help=f"The NATS server. Without: that of the weir serve on this machine, else {DEFAULT_NATS_URL}.",
            ),
        ),
        "data_dir": (
            Path,
            typer.Option("--data-dir", metavar="FOLDER", help="The data folder of a weir serve on this machine."),
        ),
        **{
            option.key: (
                str,
                typer.Option(*option.names, envvar=option.environment, metavar=option.value.metavar, help=option.help),
            )
            for option in ACCESS_OPTIONS
        },
    }
    hints = get_type_hints(command, include_extras=True)

    @functools.wraps(command)
    def typed(**values: Any) -> None:
        asked = {key: values.pop(key) for key in described}
        command(**values, broker=NamedBroker.choose(asked["nats"], asked["data_dir"], BrokerAccess.of(asked)))

    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "broker"
    ]
    added = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])
        for key, (kind, option) in described.items()
    ]
    typed.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    typed.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
    del typed.__wrapped__  # typer would look there for what the options are
    return typed

"""Finds the running server, and its broker, that a command talks to.

All commands that talk to a server select it in the same way: the one given by an option, else the only `weir serve` of this
user on this machine (`local.servers`), else the default address. If several run, the command fails and lists them with the
option that selects each: no command acts on a server by guess. What a command prints of further commands carries the option
that was given, so that they act on the same server.
"""

from __future__ import annotations

import functools
import inspect
import shlex
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, get_type_hints
from urllib.parse import quote

import typer

from weir import NATS_URL_VARIABLE
from weir.bus.nats.access import NO_ACCESS, BrokerAccess, BrokerServer
from weir.commands.local.servers import LocalServer, local_servers, loopback_port, without_users
from weir.errors import StartError
from weir.options.broker import ACCESS_OPTIONS, NATS_OPTION
from weir.options.option import UsageError


class BrokerTarget(NamedTuple):
    """The URL and credentials of the broker that a command uses; `hint` is added to connection errors.

    `option` is what was given to select it, with a leading space (" --data-dir FOLDER"), for commands that are printed. It
    is "" if nothing was given.
    """

    url: str
    access: BrokerAccess = NO_ACCESS
    hint: str = ""
    option: str = ""

    @classmethod
    def choose(cls, url: str | None, data_dir: Path | None, access: BrokerAccess) -> Self:
        """The broker at `url`; without a URL that of the only local server (named on stderr), else the default one.

        Raises UsageError if several local servers run, StartError if the broker of the only one has not started yet.
        """
        if url and data_dir is None:
            return cls(url, access_to(url, access), option=f" --nats {shlex.quote(without_users(url))}")
        server = only_local_server(data_dir, "--nats URL")
        if server is None:
            return cls(DEFAULT_NATS_URL, access, f"{none_found_hint(DEFAULT_NATS_URL)}--nats URL.")
        if not server.nats_url:
            raise StartError(f"the broker of the server found on this machine has not started yet: {server}")
        if data_dir is None:
            typer.echo(f"server found on this machine: {server}", err=True)
        own = server.access(access) if server.data_dir is not None else access_to(server.nats_url, access)
        return cls(server.nats_url, own, option=data_dir_option(data_dir))

    def url_for_clients(self) -> str:
        """The URL with the user and the password, for other programs. Raises StartError if no server was found."""
        if self.hint:
            raise StartError(f"no weir serve was found. {self.hint}")
        if not self.access.user or without_users(self.url) != self.url or "," in self.url:
            return self.url
        server = BrokerServer.of(self.url)
        secrets = f"{quote(self.access.user, '')}:{quote(self.access.password, '')}"
        return f"{'tls' if server.is_tls else 'nats'}://{secrets}@{server.place}"

    @asynccontextmanager
    async def connected(self, name: str, timeout_s: float = 10.0) -> AsyncIterator[Any]:
        """Connect a `Bus` as user "admin". Raises OSError if the broker does not reply within `timeout_s`."""
        import asyncio

        from weir.bus.nats.connection import Bus

        async with asyncio.TaskGroup() as background:
            try:
                bus = await Bus.connect(self.url, name, background, timeout_s, self.access)
            except OSError as error:
                if not self.hint:
                    raise
                raise ConnectionError(f"{error}. {self.hint}") from error
            try:
                yield bus
            finally:
                await bus.close()


@contextmanager
def unwrap_exception_groups(*kinds: type[BaseException]) -> Iterator[None]:
    """Raise the first error of an exception group in place of the group, if all its errors are of these types.

    `except*` is not used: some releases of Python 3.11 wrap an exception raised there in a group again.
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


class BrokerChoice(NamedTuple):
    """The options that select a broker, before one is looked for."""

    url: str | None
    data_dir: Path | None
    access: BrokerAccess

    def target(self) -> BrokerTarget:
        """The broker. Raises UsageError as `BrokerTarget.choose`."""
        return BrokerTarget.choose(*self)


def with_broker_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that select the broker to a typer command, which receives it as its argument `broker`."""
    return _with_broker_options(command, BrokerChoice.target)


def with_broker_choice(command: Callable[..., None]) -> Callable[..., None]:
    """As `with_broker_options`, for a command that may not need the broker: `broker` is a `BrokerChoice`."""
    return _with_broker_options(command, lambda choice: choice)


def _with_broker_options(command: Callable[..., None], broker_of: Callable[[BrokerChoice], Any]) -> Callable[..., None]:
    described: dict[str, tuple[type, Any]] = {
        "nats": (
            str,
            typer.Option(
                "--nats",
                envvar=NATS_URL_VARIABLE,
                metavar=NATS_OPTION.value.metavar,
                help=f"The NATS server. Default: that of the weir serve on this machine, else {DEFAULT_NATS_URL}.",
            ),
        ),
        "data_dir": (
            Path,
            typer.Option(
                "--data-dir",
                metavar="FOLDER",
                help="Data folder of a weir serve on this machine, to select its server.",
            ),
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
    def run_typed(**values: Any) -> None:
        given = {key: values.pop(key) for key in described}
        url = NATS_OPTION.read(given["nats"]) if given["nats"] else None
        choice = BrokerChoice(url, given["data_dir"], BrokerAccess.of(given))
        command(**values, broker=broker_of(choice))

    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "broker"
    ]
    added = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])
        for key, (kind, option) in described.items()
    ]
    run_typed.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    run_typed.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
    del run_typed.__wrapped__  # typer would read the options from it
    return run_typed


DEFAULT_NATS_URL = "nats://localhost:4222"
URL_VARIABLE = "WEIR_URL"
"""The environment variable with the HTTP address of the gateway that commands use."""

DEFAULT_HTTP = "localhost:8000"
DEFAULT_GRPC = "localhost:8001"

HttpUrl = Annotated[
    str,
    typer.Option(
        "--url",
        envvar=URL_VARIABLE,
        metavar="HOST:PORT",
        help=f"The server's HTTP address. Default: that of the weir serve on this machine, else {DEFAULT_HTTP}.",
    ),
]
LocalDataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", metavar="FOLDER", help="Data folder of a weir serve on this machine, to select its server."
    ),
]
"""The options of commands that ask a gateway over HTTP."""


def only_local_server(data_dir: Path | None, option: str) -> LocalServer | None:
    """The only running server with this data folder, or with any; None if none runs and `data_dir` is None.

    Servers that share a broker count as one. Raises UsageError if several run (`option` is the option to choose one, as
    "--nats URL"), or none with this data folder.
    """
    found = local_servers(data_dir)
    if len({one.cluster for one in found}) > 1:
        listed = "".join(f"\n  {one.chosen_with(option)}   ({one})" for one in found)
        raise UsageError(
            f"several weir serve run on this machine; choose one with {option} or --data-dir FOLDER:{listed}"
        )
    if not found and data_dir is not None:
        raise UsageError(f"no weir serve runs with data folder {data_dir}")
    return found[0] if found else None


def access_to(nats_url: str, requested: BrokerAccess) -> BrokerAccess:
    """The credentials for the broker at `nats_url`: `requested`, completed by those of a local server with this URL."""
    port = loopback_port(nats_url)
    if not port:
        return requested
    own = (one for one in local_servers() if one.data_dir is not None and loopback_port(one.nats_url) == port)
    return next((one.access(requested) for one in own), requested)


def none_found_hint(address: str) -> str:
    """The hint for a connection error at the default `address`, which is used because no local server was found."""
    return (
        f"{address} is the default because no weir serve of this user runs on this machine. To use another server, select "
        "it with "
    )


def data_dir_option(data_dir: Path | None) -> str:
    """The option that selects the server of a data folder, with a leading space; "" for None."""
    return "" if data_dir is None else f" --data-dir {shlex.quote(str(data_dir.absolute()))}"

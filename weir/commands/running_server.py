"""Finds the running server, and its broker, that a command talks to.

`weir status`, `dead`, `push` and `batch` select a server in the same way: the one given by an option, else the only
`weir serve` running on this machine (found by the files in its data folder, below `data_home` or in `WEIR_DATA_DIR`), else
the default address. If several run, the command fails and lists them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, get_type_hints

import typer

from weir import DATA_DIR_VARIABLE, NATS_URL_VARIABLE
from weir.bus.nats.access import NO_ACCESS, BrokerAccess, BrokerServer
from weir.bus.nats.embedded_server import url_of_folder
from weir.options.broker import ACCESS_OPTIONS
from weir.options.option import UsageError


class BrokerTarget(NamedTuple):
    """The URL and credentials of the broker that a command uses; `hint` is added to connection errors."""

    url: str
    access: BrokerAccess = NO_ACCESS
    hint: str = ""

    @classmethod
    def choose(cls, url: str | None, data_dir: Path | None, access: BrokerAccess) -> Self:
        """The broker at `url`; without a URL that of the only local server (named on stderr), else the default one.

        Raises UsageError if several local servers run.
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
                metavar="URL",
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
        choice = BrokerChoice(given["nats"], given["data_dir"], BrokerAccess.of(given))
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

_ADDRESSES_FILE = "addresses.json"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class LocalServer(NamedTuple):
    """One running `weir serve`. `http` and `grpc` are its addresses ("host:port"); "" if one is off or not ready yet."""

    data_dir: Path
    nats_url: str
    http: str = ""
    grpc: str = ""

    def access(self, requested: BrokerAccess) -> BrokerAccess:
        """The credentials for its broker: `requested`, or the server's own user and password if that names no user."""
        url = "" if requested.user or requested.credentials or requested.nkey else url_of_folder(self.data_dir)
        if not url:
            return requested
        server = BrokerServer.of(url)
        return replace(requested, user=server.user, password=server.password or "")

    def __str__(self) -> str:
        places = ([f"http://{self.http}"] if self.http else []) + [self.nats_url, f"data folder {self.data_dir}"]
        return ", ".join(places)


def data_home() -> Path:
    """The default parent folder of the data folders of `weir serve`, one per port."""
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "weir"


def local_servers(folder: Path | None = None) -> list[LocalServer]:
    """The running servers with data folder `folder`, or with any folder in `data_home` or the one of the environment."""
    if folder is not None:
        folders = [folder]
    else:
        named = os.environ.get(DATA_DIR_VARIABLE)
        folders = sorted({*data_home().glob("*"), *([Path(named)] if named else [])})
    found = []
    for one in folders:
        url = next(filter(None, map(_nats_url, one.glob("nats-server_*.ports"))), "")
        if url:
            addresses = _addresses(one, url)
            found.append(LocalServer(one, url, addresses.get("http", ""), addresses.get("grpc", "")))
    return found


def write_addresses(data_dir: Path, addresses: Mapping[str, str]) -> None:
    """Write a server's addresses (`nats_url`, and "host:port" by protocol) to its data folder, for local commands.

    Commands find the broker without this file too, so a folder that is not writable is not an error.
    """
    path = data_dir / _ADDRESSES_FILE
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(dict(addresses), file)


def only_local_server(data_dir: Path | None, option: str) -> LocalServer | None:
    """The only running server with this data folder, or with any; None if none runs and `data_dir` is None.

    Raises UsageError if several run (`option` is the option to choose one), or none with this data folder.
    """
    found = local_servers(data_dir)
    if len(found) > 1:
        listed = "".join(f"\n  {one}" for one in found)
        raise UsageError(
            f"several weir serve run on this machine; choose one with {option} or --data-dir FOLDER:{listed}"
        )
    if not found and data_dir is not None:
        raise UsageError(f"no weir serve runs with data folder {data_dir}")
    return found[0] if found else None


def access_to(nats_url: str, requested: BrokerAccess) -> BrokerAccess:
    """The credentials for the broker at `nats_url`: `requested`, completed by those of a local server with this URL."""
    port = _loopback_port(nats_url)
    if not port:
        return requested
    named = next((one for one in local_servers() if _loopback_port(one.nats_url) == port), None)
    return named.access(requested) if named else requested


def none_found_hint(address: str) -> str:
    """The hint for a connection error at the default `address`, which is used because no local server was found."""
    return (
        f"{address} is the default because no weir serve with a data folder below {data_home()} is running. A server with "
        "another --data-dir, or with --http-port 0, prints its addresses at startup: select it with "
    )


def _loopback_port(nats_url: str) -> int:
    """The port of a loopback URL without a user; 0 for all other URLs."""
    try:
        server = BrokerServer.of(nats_url)
    except ValueError:
        return 0
    return server.port if server.host in _LOOPBACK and not server.user else 0


def _addresses(folder: Path, nats_url: str) -> dict[str, str]:
    try:
        addresses: Any = json.loads((folder / _ADDRESSES_FILE).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(addresses, dict) or addresses.get("nats_url") != nats_url:
        return {}  # left by an earlier server that was killed
    return {name: value for name, value in addresses.items() if isinstance(value, str)}


def _nats_url(ports: Path) -> str:
    pid = ports.stem.rpartition("_")[2]
    try:
        # A killed server leaves its file behind.
        is_running = pid.isdigit() and b"nats-server.conf" in Path(f"/proc/{pid}/cmdline").read_bytes()
        url = json.loads(ports.read_text())["nats"][0]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return ""
    return url if is_running and isinstance(url, str) else ""

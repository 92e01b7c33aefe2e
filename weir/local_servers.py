"""The servers of `weir serve` that run on this machine, found by the files in their data folders.

All commands that talk to a running server (`weir status`, `dead`, `push`, `batch`) choose it in one way: the one that was
named, else the only one that runs here, else the usual address. Several are an error that names them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bus.broker_access import BrokerAccess, BrokerServer
from bus.embedded import url_of_folder
from weir.options.option import UsageError

DEFAULT_NATS_URL = "nats://localhost:4222"
DEFAULT_HTTP = "localhost:8000"

_ADDRESSES_FILE = "addresses.json"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class LocalServer(NamedTuple):
    """One that runs. `http` is its HTTP address ("host:port"); "" where it has none, or is not ready yet."""

    data_dir: Path
    nats_url: str
    http: str = ""

    def access(self, asked: BrokerAccess) -> BrokerAccess:
        """How its message bus is spoken to by a command whose options and environment say `asked`.

        By its own user and password, unless `asked` names others.
        """
        url = "" if asked.user or asked.credentials or asked.nkey else url_of_folder(self.data_dir)
        if not url:
            return asked
        server = BrokerServer.of(url)
        return replace(asked, user=server.user, password=server.password or "")

    def __str__(self) -> str:
        places = ([f"http://{self.http}"] if self.http else []) + [self.nats_url, f"data folder {self.data_dir}"]
        return ", ".join(places)


def data_home() -> Path:
    """The folder in which `weir serve` keeps a data folder for each port, unless it is told otherwise."""
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "weir"


def local_servers(folder: Path | None = None) -> list[LocalServer]:
    """Those that run with the data folder `folder`, or with any folder in `data_home`."""
    folders = [folder] if folder is not None else sorted(data_home().glob("*"))
    found = []
    for one in folders:
        url = next(filter(None, map(_nats_url, one.glob("nats-server_*.ports"))), "")
        if url:
            found.append(LocalServer(one, url, _addresses(one, url).get("http", "")))
    return found


def write_addresses(data_dir: Path, addresses: Mapping[str, str]) -> None:
    """Write down where a server listens (`nats_url` and, by door, "host:port"), for commands on this machine.

    Without the file they still find the message bus, so an unwritable folder is not an error here.
    """
    path = data_dir / _ADDRESSES_FILE
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(dict(addresses), file)


def only_local_server(data_dir: Path | None, option: str) -> LocalServer | None:
    """The one that runs with this data folder, or with any; None where none runs and no folder was named.

    Raises UsageError where several run (`option` names one of them instead), or none with this data folder.
    """
    found = local_servers(data_dir)
    if len(found) > 1:
        listed = "".join(f"\n  {one}" for one in found)
        raise UsageError(
            f"several servers of weir serve run here; choose one by {option} or --data-dir FOLDER:{listed}"
        )
    if not found and data_dir is not None:
        raise UsageError(f"no server of weir serve runs with data folder {data_dir}")
    return found[0] if found else None


def access_to(nats_url: str, asked: BrokerAccess) -> BrokerAccess:
    """How the message bus at `nats_url` is spoken to: as `asked`, with what a local server of this URL wants."""
    port = _loopback_port(nats_url)
    if not port:
        return asked
    named = next((one for one in local_servers() if _loopback_port(one.nats_url) == port), None)
    return named.access(asked) if named else asked


def none_found_hint(asked: str) -> str:
    """What to say where no local server was found and nobody answers at the default address `asked`."""
    return (
        f"{asked} was asked because no server of weir serve keeps its data below {data_home()}. A server that runs "
        "with another --data-dir, or with --http-port 0, prints its addresses when it starts: name it with "
    )


def _loopback_port(nats_url: str) -> int:
    """The port of a URL of this machine that names no user; 0 for all other URLs."""
    try:
        server = BrokerServer.of(nats_url)
    except ValueError:
        return 0
    return server.port if server.host in _LOOPBACK and not server.user else 0


def _addresses(folder: Path, nats_url: str) -> dict[str, str]:
    try:
        told: Any = json.loads((folder / _ADDRESSES_FILE).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(told, dict) or told.get("nats_url") != nats_url:
        return {}  # of an earlier server, which was killed
    return {name: value for name, value in told.items() if isinstance(value, str)}


def _nats_url(ports: Path) -> str:
    pid = ports.stem.rpartition("_")[2]
    try:
        # What was killed has left its file behind.
        is_running = pid.isdigit() and b"nats-server.conf" in Path(f"/proc/{pid}/cmdline").read_bytes()
        url = json.loads(ports.read_text())["nats"][0]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return ""
    return url if is_running and isinstance(url, str) else ""

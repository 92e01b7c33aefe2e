"""The `weir serve` that run on this machine: each registers itself (`ServerRegistration`), and commands list them.

A server registers in the home of its user, whatever its data folder: a folder below `data_home`, which the process holds
locked, has its addresses. The kernel releases the lock when the process ends, so a killed server is never listed, and a
later one removes its folder. Servers of other users are not listed: their passwords are not readable either.

The embedded server of a data folder is found in that folder too (`--data-dir`, or `WEIR_DATA_DIR` in a container), also
where it could not register because there is no home.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from weir import DATA_DIR_VARIABLE
from weir.bus.nats.access import BrokerAccess, BrokerServer
from weir.bus.nats.embedded_server import LOCK_FILE, url_of_folder
from weir.commands.local.data_folders import data_home
from weir.runtime.certificates import first_certificate
from weir.runtime.folders.locked import LockedFolder, is_held, remove_abandoned_folders
from weir.runtime.folders.private import private_folder, write_private

logger = logging.getLogger("weir.serve")

_REGISTERED = "servers"
_ADDRESSES_FILE = "addresses.json"
_USER = re.compile(r"(?:^|(?<=,)|(?<=://))[^\s,/@]*@")
"""The user and the password in each of the URLs of a broker."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class LocalServer(NamedTuple):
    """One running `weir serve`.

    `data_dir` is None if another program runs its broker. `nats_url` has no user; "" before the broker has started. `http`
    and `grpc` are addresses ("host:port"); "" if one is off or not ready yet. `tls_cert` and `grpc_tls_cert` are the files
    with their certificates, "" without TLS. `access_policy` and `access_keys` are the files of these options, "" for none.
    """

    data_dir: Path | None
    nats_url: str
    http: str = ""
    grpc: str = ""
    access_policy: str = ""
    access_keys: str = ""
    tls_cert: str = ""
    grpc_tls_cert: str = ""

    def access(self, requested: BrokerAccess) -> BrokerAccess:
        """The credentials for its broker: `requested`, or the server's own user and password if that names no user."""
        has_user = requested.user or requested.credentials or requested.nkey
        url = "" if has_user or self.data_dir is None else url_of_folder(self.data_dir)
        if not url:
            return requested
        server = BrokerServer.of(url)
        return replace(requested, user=server.user, password=server.password or "")

    @property
    def http_url(self) -> str:
        """The URL of HTTP, "" if `http` is."""
        return f"{'https' if self.tls_cert else 'http'}://{self.http}" if self.http else ""

    @property
    def http_place(self) -> str:
        """What an option such as `--url` takes for HTTP: `http`, or the URL where it is encrypted."""
        return self.http_url if self.tls_cert else self.http

    @property
    def grpc_place(self) -> str:
        """What an option such as `--url` takes for gRPC: `grpc`, or the URL where it is encrypted."""
        return f"grpcs://{self.grpc}" if self.grpc and self.grpc_tls_cert else self.grpc

    @property
    def cluster(self) -> str:
        """The same for servers that share a broker, whose models, queues and jobs are the same."""
        port = loopback_port(self.nats_url)
        return f"127.0.0.1:{port}" if port else self.nats_url or str(self.data_dir)

    def chosen_with(self, option: str) -> str:
        """The option that selects this server, where `option` is one that names an address: "--nats URL"."""
        if self.data_dir is not None:
            return f"--data-dir {shlex.quote(str(self.data_dir))}"
        name = option.partition(" ")[0]
        return f"{name} {shlex.quote(self.nats_url if name == '--nats' else self.http_place)}"

    def __str__(self) -> str:
        places = [self.http_url] if self.http else []
        places += [self.nats_url] if self.nats_url else []
        places += [f"data folder {self.data_dir}"] if self.data_dir is not None else []
        return ", ".join(places)


class ServerRegistration:
    """Registers this process as a server until `remove`, or until it ends.

    `data_dir` is the folder of its broker, None for a broker at `nats_url` that another program runs. A server that can't
    register serves all the same: commands select it by an option.
    """

    def __init__(self, data_dir: Path | None, nats_url: str = "") -> None:
        self._data_dir = data_dir.absolute() if data_dir is not None else None
        self._folder: LockedFolder | None = None
        try:
            registered = private_folder(data_home() / _REGISTERED)
            remove_abandoned_folders("", registered)
            self._folder = LockedFolder("", registered)
        except (OSError, RuntimeError) as error:
            logger.info("commands find this server by an option or %s only: %s", DATA_DIR_VARIABLE, error)
        self.announce({"nats_url": nats_url})

    def announce(self, addresses: Mapping[str, str]) -> None:
        """Replace what commands read: `nats_url`, whose secrets are left out, and "host:port" by protocol,
        besides the files of the access options.

        Commands find the broker without the addresses too, so a folder that can't be written is not an error.
        """
        shown = {**addresses, "nats_url": without_users(addresses["nats_url"])}
        if self._data_dir is not None and shown["nats_url"]:
            write_addresses(self._data_dir, shown)
        if self._folder is not None:
            place = {"data_dir": str(self._data_dir or ""), "network": _network()}
            write_addresses(self._folder.path, {**place, **shown})

    def remove(self) -> None:
        """Commands do not find the server any more. May be called repeatedly."""
        if self._folder is not None:
            self._folder.remove()


def local_servers(folder: Path | None = None) -> list[LocalServer]:
    """The running servers of this user with data folder `folder`, or with any: those with HTTP first, then by folder.

    Those that could not register are found in `folder`, in the folders below `data_home`, and in that of the environment.
    """
    found = list(_registered_servers())
    if folder is not None:
        folders = [folder]
        found = [one for one in found if one.data_dir and os.path.realpath(one.data_dir) == os.path.realpath(folder)]
    else:
        named = os.environ.get(DATA_DIR_VARIABLE)
        folders = [*_default_folders(), *([Path(named)] if named else [])]
    places = {os.path.realpath(one.data_dir) for one in found if one.data_dir}
    for place in {os.path.realpath(one): one for one in folders if os.path.realpath(one) not in places}.values():
        if (server := _server_of(place)) is not None:
            found.append(server)
    return sorted(found, key=lambda one: (not one.http, one.data_dir is None, str(one.data_dir), one.nats_url))


def local_certificate(host: str, port: int) -> str:
    """The certificate (PEM) of the server of this user that serves HTTP or gRPC with TLS there, "" if none does."""
    for server in local_servers():
        for place, cert in ((server.http, server.tls_cert), (server.grpc, server.grpc_tls_cert)):
            own_host, _, own_port = place.rpartition(":")
            is_reached = host == own_host.strip("[]") or (host in _LOOPBACK and is_at_loopback(own_host.strip("[]")))
            if cert and own_port == str(port) and is_reached:
                with contextlib.suppress(OSError, ValueError):
                    return first_certificate(Path(cert).read_text())
    return ""


def is_at_loopback(address: str) -> bool:
    """Whether a server that listens on this address or name can be reached at localhost."""
    try:
        return address == "localhost" or (one := ipaddress.ip_address(address)).is_loopback or one.is_unspecified
    except ValueError:
        return False


def without_users(nats_url: str) -> str:
    """The URL of one or several servers of a broker, without users and passwords."""
    return _USER.sub("", nats_url)


def write_addresses(folder: Path, addresses: Mapping[str, str]) -> None:
    """Write a server's addresses to `folder`, if that can be written."""
    with contextlib.suppress(OSError):
        write_private(folder / _ADDRESSES_FILE, json.dumps(dict(addresses)))


def loopback_port(nats_url: str) -> int:
    """The port of a loopback URL without a user; 0 for all other URLs."""
    try:
        server = BrokerServer.of(nats_url) if nats_url else None
    except ValueError:
        return 0
    return server.port if server is not None and server.host in _LOOPBACK and not server.user else 0


def _registered_servers() -> Iterator[LocalServer]:
    try:
        folders = list(private_folder(data_home() / _REGISTERED, creates=False).iterdir())
    except (OSError, RuntimeError):
        return
    for folder in folders:
        addresses = _addresses(folder) if is_held(folder) else {}
        if not addresses or addresses.get("network") != _network():
            continue
        data_dir = Path(addresses["data_dir"]) if addresses.get("data_dir") else None
        nats_url = addresses.get("nats_url", "") or (_nats_url_of(data_dir) if data_dir is not None else "")
        yield LocalServer(data_dir, nats_url, **_places(addresses))


def _default_folders() -> list[Path]:
    try:
        return list(data_home().glob("*"))
    except (OSError, RuntimeError):
        return []


def _server_of(data_dir: Path) -> LocalServer | None:
    """The server whose broker runs in this data folder."""
    nats_url = _nats_url_of(data_dir)
    if not nats_url:
        return None
    addresses = _addresses(data_dir)
    if addresses.get("nats_url") != nats_url:
        addresses = {}  # left by an earlier server that was killed
    return LocalServer(data_dir, nats_url, **_places(addresses))


_PLACES = ("http", "grpc", "tls_cert", "grpc_tls_cert", "access_policy", "access_keys")


def _places(addresses: Mapping[str, str]) -> dict[str, str]:
    return {name: addresses.get(name, "") for name in _PLACES}


def _addresses(folder: Path) -> dict[str, str]:
    try:
        addresses: Any = json.loads((folder / _ADDRESSES_FILE).read_text())
    except (OSError, ValueError):
        return {}
    items = addresses.items() if isinstance(addresses, dict) else ()
    return {name: value for name, value in items if isinstance(value, str)}


def _nats_url_of(data_dir: Path) -> str:
    """The URL of the nats-server that runs in this data folder; "" if none does, or on another machine."""
    if not is_held(data_dir, LOCK_FILE):
        return ""
    return next(filter(None, map(_announced_url, data_dir.glob("nats-server_*.ports"))), "")


def _announced_url(ports: Path) -> str:
    pid = ports.stem.rpartition("_")[2]
    try:
        # A killed server leaves its file behind, and a server of another machine may have the folder.
        is_running = pid.isdigit() and b"nats-server.conf" in Path(f"/proc/{pid}/cmdline").read_bytes()
        url = json.loads(ports.read_text())["nats"][0]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return ""
    return url if is_running and isinstance(url, str) else ""


def _network() -> str:
    """Equal for processes for which a loopback address leads to the same place; machines may share a home."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""

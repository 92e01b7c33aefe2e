"""Where `weir key` and `weir access check` find the keys: in a file, or in the message broker of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

import weir.bus.nats.nats_py  # noqa: F401  # isort: skip  # ahead of all that imports nats-py

import typer
from nats.errors import Error as NatsError

from weir.access.keys.ring import KeyProblem, KeyRing
from weir.bus.kv.access_keys import AccessKeys
from weir.bus.naming.identity import new_id
from weir.cluster.access.key_file import KeyFile
from weir.commands.running_server import BrokerChoice, BrokerTarget, only_local_server, unwrap_exception_groups
from weir.errors import StartError

T = TypeVar("T")


class KeyStore(Protocol):
    """Where keys are kept. All methods raise StartError, for a change that can't be made with the reason."""

    def ring(self) -> KeyRing:
        """All keys."""

    def change(self, name: str, change: Callable[[KeyRing], KeyRing]) -> None:
        """Replaces the keys of this name by those of `change(ring)`, which may be called again."""

    def revoke(self, name_or_id: str) -> None:
        """Removes the key of this id, or all of this name."""


def key_store(broker: BrokerChoice, file: Path | None) -> KeyStore:
    """The keys in `file`; without one in the file that the server on this machine reads, else in the broker."""
    if file is None and not broker.url:
        server = only_local_server(broker.data_dir, "--nats URL")
        if server is not None and server.access_keys:
            typer.echo(f"keys of the server on this machine: {server.access_keys}", err=True)
            file = Path(server.access_keys)
        elif server is not None and not server.access_policy:
            typer.echo("the server has no access policy: keys have no effect before it has one", err=True)
    return _StoreInFile(file) if file is not None else _StoreInBroker(broker.target())


class _StoreInFile:
    """Implements `KeyStore`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = KeyFile(path)

    def ring(self) -> KeyRing:
        return self._run(self._file.ring)

    def change(self, _name: str, change: Callable[[KeyRing], KeyRing]) -> None:
        self._run(lambda: self._file.change(change))

    def revoke(self, name_or_id: str) -> None:
        self._run(lambda: self._file.change(lambda ring: ring.revoke(name_or_id)))

    def _run(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except KeyProblem as error:
            raise StartError(str(error)) from error
        except OSError as error:
            raise StartError(f"key file {self._path}: {error.strerror or error}") from error
        except ValueError as error:
            raise StartError(f"key file {self._path}: {error}") from error


class _StoreInBroker:
    """Implements `KeyStore`."""

    def __init__(self, broker: BrokerTarget) -> None:
        self._broker = broker

    def ring(self) -> KeyRing:
        async def read(keys: AccessKeys) -> KeyRing:
            await keys.start(is_maker=False)
            return keys.ring()

        return self._run(read)

    def change(self, name: str, change: Callable[[KeyRing], KeyRing]) -> None:
        async def write(keys: AccessKeys) -> None:
            await keys.start()
            await keys.change(name, change)

        self._run(write)

    def revoke(self, name_or_id: str) -> None:
        async def write(keys: AccessKeys) -> None:
            await keys.start()
            names = {key.name for key in keys.ring().records if name_or_id in (key.id, key.name)}
            for name in sorted(names) or [name_or_id]:
                await keys.change(name, lambda ring: ring.revoke(name_or_id))

        self._run(write)

    def _run(self, act: Callable[[AccessKeys], Awaitable[T]]) -> T:
        async def connected() -> T:
            with unwrap_exception_groups(KeyProblem, NatsError, OSError, TimeoutError):
                async with self._broker.connected(new_id("key")) as bus:
                    return await act(AccessKeys(bus))

        try:
            return asyncio.run(connected())
        except KeyProblem as error:
            raise StartError(str(error)) from error
        except (NatsError, OSError, TimeoutError) as error:
            raise StartError(str(error) or type(error).__name__) from error

"""Checks of folders and ports before any process is started; failures are StartErrors of one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from weir.commands.listening import listen_problem
from weir.errors import StartError
from weir.repository.stores.addresses import is_cloud_address, parse_address
from weir.runtime.extras import is_installed, missing_extra
from weir.schemas.core.names import repository_of


class Listener(NamedTuple):
    """An address to listen on; `protocol` is Triton's name, `shares` allows other servers on the same port."""

    protocol: str
    address: str
    port: int
    shares: bool = False


def check_repositories(paths: Sequence[str | Path] | None, may_be_absent: bool = False) -> tuple[Path | str, ...]:
    """The model repositories: folders as absolute paths, repositories in NATS or in object stores as addresses.

    Raises StartError, in Triton's wording where Triton has one; also for an address or credentials that can't be read. An
    object store is asked by workers. With `may_be_absent` a folder need not exist.
    """
    if not paths:
        raise StartError("--model-repository must be specified")
    checked: list[Path | str] = []
    for path in paths:
        if _lies_in_nats(path):
            checked.append(path)
            continue
        if is_cloud_address(str(path)):
            checked.append(_check_store(str(path)))
            continue
        if not may_be_absent and not Path(path).is_dir():
            raise StartError(f"model repository {path} is not a folder")
        checked.append(Path(path).absolute())
    # As in Triton, duplicates count once.
    return tuple(dict.fromkeys(checked))


def _check_store(address: str) -> str:
    from weir.repository.stores.credentials import check_access  # late: most servers have folders

    try:
        problem = check_access(parse_address(address))
    except ValueError as error:
        raise StartError(f"invalid model repository: {error}") from error
    if problem:
        raise StartError(problem)
    if not is_installed("cloud"):
        raise StartError(missing_extra(f"model repository {address}", "cloud"))
    return address


def _lies_in_nats(path: str | Path) -> bool:
    try:
        return repository_of(path) is not None
    except ValueError as error:
        raise StartError(f"invalid model repository {path}: {error}") from error


def check_backend_directories(paths: Sequence[str | Path]) -> tuple[Path, ...]:
    """The backend directories as absolute paths. Raises StartError for one that does not exist."""
    for path in paths:
        if not Path(path).is_dir():
            raise StartError(f"backend directory {path} is not a folder")
    return tuple(dict.fromkeys(Path(path).absolute() for path in paths))


def check_agent_directory(path: str | Path | None) -> Path | None:
    """The folder of repository agents as an absolute path. Raises StartError if it does not exist."""
    if path is None:
        return None
    if not Path(path).is_dir():
        raise StartError(f"repository agent directory {path} is not a folder")
    return Path(path).absolute()


def check_port_range(listeners: Sequence[Listener], first: int, last: int) -> None:
    """Check that each port lies between `first` and `last`. Raises StartError, in Triton's wording."""
    for protocol, _, port, _ in listeners:
        if not first <= port <= last:
            raise StartError(
                f"The server cannot listen to {protocol} requests at port {port}, allowed port range is [{first}, {last}]"
            )


def check_listeners(listeners: Sequence[Listener]) -> None:
    """Check that each address is free; port 0 always is. Raises StartError."""
    taken: dict[tuple[str, int], str] = {}
    for protocol, address, port, _ in listeners:
        other = taken.setdefault((address, port), protocol)
        if port and other != protocol:
            raise StartError(
                f"The server cannot listen to {other} requests and {protocol} requests "
                f"at the same address and port {address}:{port}"
            )
    for listener in listeners:
        _check_free(*listener)


def _check_free(protocol: str, address: str, port: int, shares: bool) -> None:
    problem = listen_problem(address, port, shares)
    if problem:
        raise StartError(f"can't listen for {protocol} requests at {address}:{port}: {problem}")

"""`weir push`: stores folders of models in a repository in NATS, for workers that share no file system."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import weir.bus.nats.nats_py  # noqa: F401  # isort: skip  # ahead of all that imports nats-py

import typer
from nats.errors import Error as NatsError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from weir.bus.kv.pushed_models import PIECE_BYTES, PushedModels
from weir.bus.naming.identity import new_id
from weir.bus.nats.connection import Bus
from weir.commands.running_server import BrokerTarget, unwrap_exception_groups
from weir.errors import StartError
from weir.options import UsageError
from weir.repository.paths import check_folder_name, check_model_name, path_inside
from weir.schemas.core.errors import WeirError
from weir.schemas.core.names import check_repository_name
from weir.schemas.wire.model_control import MAX_PUSHED_FILES, PushedFile, PushedModel, is_inside

_IGNORED_FOLDERS = frozenset({"__pycache__"})


def run(
    broker: BrokerTarget, repository: str, folders: Sequence[Path], deleted: Sequence[str], list_models: bool
) -> None:
    """Push the folders, delete the models, then list the repository. Raises StartError, UsageError."""
    try:
        check_repository_name(repository)
        asyncio.run(_push(broker, repository, folders, deleted, list_models))
    except ValueError as error:
        raise UsageError(str(error)) from error
    except WeirError as error:
        raise StartError(error.message) from error
    except (NatsError, OSError) as error:
        raise StartError(str(error) or type(error).__name__) from error


async def _push(
    broker: BrokerTarget, repository: str, folders: Sequence[Path], deleted: Sequence[str], list_models: bool
) -> None:
    # Invalid folders are found before anything is sent.
    models = [(folder, await asyncio.to_thread(describe, folder)) for folder in folders]
    async with _connected(broker) as bus:
        pushed = PushedModels(bus, repository)
        for folder, model in models:
            await _push_model(pushed, folder, model)
        for name in deleted:
            check_model_name(name)
            was_there = await pushed.delete(name)
            typer.echo(f"{name}: {'deleted' if was_there else f'is not in repository {repository!r}'}")
        if models or deleted:
            await pushed.sweep()
        if list_models:
            await _list(pushed)


@asynccontextmanager
async def _connected(broker: BrokerTarget) -> AsyncIterator[Bus]:
    with unwrap_exception_groups(WeirError, NatsError, OSError):
        async with broker.connected(new_id("push")) as bus:
            yield bus


async def _push_model(pushed: PushedModels, folder: Path, model: PushedModel) -> None:
    before = await pushed.find(model.name)
    revision = 0 if before is None else before[1]
    contents = {file.digest: file for file in model.files}
    missing = [file for file in contents.values() if not await pushed.has(file)]
    sent_bytes = sum(file.size_bytes for file in missing)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(model.name, total=sent_bytes)
        for file in missing:
            async for count in _send(pushed, folder, file):
                progress.advance(task, count)
    if before is not None and before[0] == model:
        typer.echo(f"{model.name}: unchanged, {len(model.files)} files")
        return
    await pushed.write(model, revision)
    # A concurrent sweep may have deleted contents that belonged to no model before the write.
    for file in contents.values():
        if not await pushed.has(file):
            async for _ in _send(pushed, folder, file):
                pass
    skipped = len(contents) - len(missing)
    typer.echo(f"{model.name}: sent {len(missing)} files, {_size(sent_bytes)}; {skipped} were already stored")


async def _send(pushed: PushedModels, folder: Path, file: PushedFile) -> AsyncIterator[int]:
    """Send a file in pieces; yields the size of each piece. Raises OSError if the file changes meanwhile."""
    digest = hashlib.sha256()
    with path_inside(folder, file.path).open("rb") as content:
        number, left = 0, file.size_bytes
        while left > 0:
            piece = await asyncio.to_thread(content.read, min(PIECE_BYTES, left))
            digest.update(piece)
            left -= len(piece)
            # The last piece makes the file visible, so the content must still match its digest.
            if not piece or (left == 0 and digest.hexdigest() != file.digest):
                raise OSError(f"file {file.path} changed while it was sent: push the model again")
            await pushed.put_piece(file, number, piece)
            number += 1
            yield len(piece)


async def _list(pushed: PushedModels) -> None:
    for name, model in (await pushed.models()).items():
        if isinstance(model, WeirError):
            typer.echo(f"{name}: {model.message}")
        else:
            typer.echo(f"{name}: {len(model.files)} files, {_size(sum(file.size_bytes for file in model.files))}")


def describe(folder: Path) -> PushedModel:
    """Describe the model in `folder`; its name is that of the folder. Blocking.

    Raises WeirError or OSError for an invalid model name and for links that lead out of the folder.
    """
    if not folder.is_dir():
        raise StartError(f"{folder} is not a folder")
    name = folder.resolve().name
    check_folder_name(name)
    _check_is_model(folder)
    files: list[PushedFile] = []
    folders: list[str] = []
    for path in sorted(_paths(folder, "")):
        if not is_inside(path.rstrip("/")):
            raise StartError(f"file {path!r} of model '{name}' has a name that can't be pushed")
        if path.endswith("/"):
            folders.append(path.rstrip("/"))
            continue
        with path_inside(folder, path).open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
            files.append(PushedFile(path, os.fstat(content.fileno()).st_size, digest))
    if not files:
        raise StartError(f"folder {folder} has no files")
    if max(len(files), len(folders)) > MAX_PUSHED_FILES:
        raise StartError(f"model '{name}' has more than {MAX_PUSHED_FILES} files")
    return PushedModel(name, tuple(files), tuple(folders))


def _check_is_model(folder: Path) -> None:
    """Raises StartError for a folder that holds no model, and says what to push where it holds folders of models."""
    if _looks_like_model(folder):
        return
    problem = f"{folder} is no model: it has neither a config.pbtxt nor a folder of a version"
    if any(_looks_like_model(inner) for inner in folder.iterdir() if inner.is_dir()):
        problem += f". It is a folder of models: push each of them, as with {folder}/*"
    raise StartError(problem)


def _looks_like_model(folder: Path) -> bool:
    names = {entry.name for entry in os.scandir(folder)}
    return bool({"config.pbtxt", "configs"} & names) or any(name.isdecimal() for name in names)


def _paths(folder: Path, prefix: str) -> Iterator[str]:
    """The paths of the model's files, and with a final `/` those of its empty folders.

    Hidden files and Python caches are left out. Raises OSError for a link to a folder.
    """
    with os.scandir(folder) as scanned:
        entries = [entry for entry in scanned if not entry.name.startswith(".") and entry.name not in _IGNORED_FOLDERS]
    if prefix and not entries:
        yield prefix
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _paths(Path(entry.path), f"{prefix}{entry.name}/")
        elif entry.is_dir():
            raise OSError(f"{prefix}{entry.name} is a link to a folder, which can't be pushed")
        else:
            yield f"{prefix}{entry.name}"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count} bytes"

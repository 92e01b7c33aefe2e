"""What `weir push` does: it puts folders of models into a repository in NATS, for workers that share no file system."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import typer
from nats.errors import Error as NatsError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from bus.connection import Bus
from bus.identity import new_id
from bus.pushed_models import PIECE_BYTES, PushedModels
from repository.paths import check_model_name, path_inside
from schemas.errors import WeirError
from schemas.pushed_model import MAX_PUSHED_FILES, PushedFile, PushedModel, is_inside
from schemas.repository_address import check_repository_name
from weir.named_broker import NamedBroker, out_of_groups
from weir.options import UsageError
from weir.start_error import StartError

_NOT_THE_MODEL_S = frozenset({"__pycache__"})


def run(
    broker: NamedBroker, repository: str, folders: Sequence[Path], deleted: Sequence[str], list_models: bool
) -> None:
    """Pushes these folders, deletes these models and lists what is there, in this order. Raises StartError, UsageError."""
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
    broker: NamedBroker, repository: str, folders: Sequence[Path], deleted: Sequence[str], list_models: bool
) -> None:
    # What can't be pushed is found before anything is sent.
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
async def _connected(broker: NamedBroker) -> AsyncIterator[Bus]:
    with out_of_groups(WeirError, NatsError, OSError):
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
    # Whoever sweeps may have taken what was there and belonged to no model, until just now.
    for file in contents.values():
        if not await pushed.has(file):
            async for _ in _send(pushed, folder, file):
                pass
    skipped = len(contents) - len(missing)
    typer.echo(f"{model.name}: sent {len(missing)} files, {_size(sent_bytes)}; {skipped} were there already")


async def _send(pushed: PushedModels, folder: Path, file: PushedFile) -> AsyncIterator[int]:
    """Sends a file piece by piece; yields how many bytes have gone. Raises OSError for one that has changed meanwhile."""
    digest = hashlib.sha256()
    with path_inside(folder, file.path).open("rb") as content:
        number, left = 0, file.size_bytes
        while left > 0:
            piece = await asyncio.to_thread(content.read, min(PIECE_BYTES, left))
            digest.update(piece)
            left -= len(piece)
            # The last piece makes the file one that is there: it must be the file that was looked at.
            if not piece or (left == 0 and digest.hexdigest() != file.digest):
                raise OSError(f"file {file.path} has changed while it was sent: push the model again")
            await pushed.put_piece(file, number, piece)
            number += 1
            yield len(piece)


async def _list(pushed: PushedModels) -> None:
    for name in await pushed.names():
        try:
            found = await pushed.find(name)
        except WeirError as error:
            typer.echo(f"{name}: {error.message}")
            continue
        if found is not None:
            files = found[0].files
            typer.echo(f"{name}: {len(files)} files, {_size(sum(file.size_bytes for file in files))}")


def describe(folder: Path) -> PushedModel:
    """The model in this folder, whose name is the folder's. Blocking.

    Raises WeirError or OSError: for a name that can't be a model's, and for links that lead out of the folder.
    """
    if not folder.is_dir():
        raise StartError(f"{folder} is not a folder")
    name = folder.resolve().name
    check_model_name(name)
    files: list[PushedFile] = []
    for path in sorted(_paths(folder, "")):
        if not is_inside(path):
            raise StartError(f"file {path!r} of model '{name}' has a name that can't be pushed")
        with path_inside(folder, path).open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
            files.append(PushedFile(path, os.fstat(content.fileno()).st_size, digest))
    if not files:
        raise StartError(f"there are no files in {folder}")
    if len(files) > MAX_PUSHED_FILES:
        raise StartError(f"model '{name}' has more than {MAX_PUSHED_FILES} files")
    return PushedModel(name, tuple(files))


def _paths(folder: Path, prefix: str) -> Iterator[str]:
    """What belongs to the model: hidden files and caches of Python don't. Raises OSError for a link to a folder."""
    for entry in os.scandir(folder):
        if entry.name.startswith(".") or entry.name in _NOT_THE_MODEL_S:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _paths(Path(entry.path), f"{prefix}{entry.name}/")
        elif entry.is_dir():
            raise OSError(f"{prefix}{entry.name} is a link to a folder, which can't be pushed")
        else:
            yield f"{prefix}{entry.name}"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count} bytes"

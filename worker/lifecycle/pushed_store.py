"""`PushedStore`: a model repository in NATS, which `weir push` writes, as mirrors read it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from nats.errors import Error as NatsError

from weir.bus.kv.pushed_models import PIECE_BYTES, PushedModels
from weir.bus.naming import subjects
from weir.bus.nats.connection import Bus, Message
from weir.repository.stores.store import FOLDER_MARK, RANGE_BYTES, StoredFile, StoredModel, StoreError
from weir.schemas.core.errors import WeirError
from weir.schemas.wire.model_control import PushedFile, PushedModel
from weir.worker.lifecycle.model_cache import SHA256_TAG

assert PIECE_BYTES == RANGE_BYTES  # noqa: S101 - a range is a piece


class PushedStore:
    """The repository called `name`; implements `ModelStore`. Runs in the event loop. A file's tag is its SHA-256."""

    def __init__(self, bus: Bus, name: str) -> None:
        self._bus = bus
        self._pushed = PushedModels(bus, name)

    @property
    def name(self) -> str:
        """The address of the repository."""
        return f"nats://{self._pushed.name}"

    async def models(self) -> Mapping[str, StoredModel]:
        """All models by name."""
        with self._request():
            return {name: _stored(name, model) for name, model in (await self._pushed.models()).items()}

    async def find(self, name: str) -> StoredModel | None:
        """The model as it was pushed last; None if it was deleted."""
        with self._request():
            try:
                found = await self._pushed.find(name)
            except WeirError as error:
                return _stored(name, error)
        return None if found is None else _stored(name, found[0])

    async def read(self, model: str, file: StoredFile, start: int, end: int) -> memoryview:
        """The range of a file."""
        pushed = PushedFile(file.path, file.size_bytes, file.tag.removeprefix(SHA256_TAG))
        with self._request():
            return memoryview(await self._pushed.piece(pushed, start // PIECE_BYTES))

    async def subscribe(self, on_change: Callable[[str], None]) -> bool:
        """Calls `on_change` with each model that is pushed or deleted, and with "" after a reconnection. True."""

        def on_write(message: Message) -> None:
            on_change(subjects.untoken(message.subject.rpartition(".")[2]))

        async def on_reconnect() -> None:
            on_change("")

        self._bus.on_reconnect(on_reconnect)
        await self._bus.subscribe(subjects.repository_writes(self._pushed.name), on_write)
        with contextlib.suppress(NatsError, OSError, TimeoutError):  # then a reconnection follows
            await self._bus.flush()
        return True

    @contextlib.contextmanager
    def _request(self) -> Iterator[None]:
        try:
            yield
        except WeirError as error:
            raise StoreError(f"model repository {self.name} can't be read: {error.message}") from error
        except (NatsError, OSError, TimeoutError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise StoreError(f"model repository {self.name} can't be read: {reason}", is_transient=True) from error


def _stored(name: str, model: PushedModel | WeirError) -> StoredModel:
    if isinstance(model, WeirError):
        return StoredModel(name, (), model.message)
    files = [StoredFile(file.path, file.size_bytes, SHA256_TAG + file.digest) for file in model.files]
    marks = [StoredFile(f"{folder}/{FOLDER_MARK}", 0, "") for folder in model.folders]
    return StoredModel(name, (*files, *marks))

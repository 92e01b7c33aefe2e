"""`CloudStore`: a model repository in S3, Google Cloud Storage or Azure Blob Storage, read with the library obstore.

The library is imported when a store is opened, in the process that reads it: its threads would not survive a fork.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

from weir.repository.stores.addresses import StoreAddress
from weir.repository.stores.credentials import StoreAccess, read_access
from weir.repository.stores.store import StoredFile, StoredModel, StoreError, describe_model, group_models
from weir.schemas.core.errors import WeirError

logger = logging.getLogger("weir.repository")

MAX_OBJECTS = 1_000_000
"""Objects of one repository."""

_PAGE = 1_000
_FIRST = "0"
"""What sorts after "/", "." and control characters, and before all but a few names of models."""

_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_QUERY = re.compile(r"\?\S*")
_URL = re.compile(r"\b(?:GET|HEAD|PUT|POST) (https?://[^\s?]+)")
_CAUSE = re.compile(r'(?:message|error): "([^"\\]{1,200})"')
_STATUS = re.compile(r"status code: (\d{3})")
_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound"})
_HINTS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a service account file, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "as": "set AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY, or AZURE_SKIP_SIGNATURE=true for a public container",
}


@dataclass(frozen=True, slots=True)
class StoreTimeouts:
    """How long a store may take: to accept a connection, and to send the next bytes of a response; how often to retry.

    `total_s` bounds one request with all its retries. It is long, because the bytes of a slow store count as progress.
    """

    connect_s: float = 2.0
    stall_s: float = 15.0
    retries: int = 2
    total_s: float = 600.0


class CloudStore:
    """The repository at an address; implements `ModelStore`. Runs in an event loop.

    It is opened by its first request, and again after a request that was denied, since credentials may have been renewed.
    """

    def __init__(self, address: StoreAddress, timeouts: StoreTimeouts = StoreTimeouts()) -> None:
        self._address = address
        self._timeouts = timeouts
        self._store: Any = None
        self._objects: list[tuple[str, int, str]] = []
        self._models: Mapping[str, StoredModel] = {}
        self._prefix = f"{address.path}/" if address.path else ""

    @property
    def name(self) -> str:
        """The address of the repository."""
        return self._address.text

    async def models(self) -> Mapping[str, StoredModel]:
        """All models by name. The listing takes one request for each thousand objects; where an object can't be listed, one
        for each model at least, and the model with that object has a problem.
        """
        try:
            objects = await self._all_objects()
        except StoreError as error:
            if not error.bad_object:
                raise
            return await self._models_one_by_one()
        # Most listings of a repository that is polled are equal to the one before.
        if objects != self._objects:
            self._models = await asyncio.to_thread(group_models, objects, len(self._prefix))
            self._objects = objects
        return self._models

    async def _all_objects(self) -> list[tuple[str, int, str]]:
        objects: list[tuple[str, int, str]] = []
        async with self._request("listed") as store:
            async for page in store.list(self._prefix or None, chunk_size=_PAGE):
                objects += map(_object, page)
                if len(objects) > MAX_OBJECTS:
                    raise StoreError(f"model repository {self.name} has more than {MAX_OBJECTS} objects")
        return objects

    async def _models_one_by_one(self) -> Mapping[str, StoredModel]:
        try:
            async with self._request("listed") as store:
                listed = await store.list_with_delimiter_async(self._prefix or None)
            names = {folder.removeprefix(self._prefix).rstrip("/") for folder in listed["common_prefixes"]}
        except StoreError as error:
            if not error.bad_object or any(name < _FIRST for name in self._models):
                raise
            names = await self._names_after_bad_ones()
        found = [await self.find(name) for name in sorted(names) if not name.startswith(".")]
        return {model.name: model for model in found if model is not None}

    async def _names_after_bad_ones(self) -> set[str]:
        """The names of models where an object beside them can't be listed, nor what is listed with it.

        Most such names begin with what can't be in a path ("", ".", "..", a control character), and come before those of
        all models: they are passed over. Raises StoreError, as before, if one comes later.
        """
        async with self._request("listed") as store:
            return {
                path.removeprefix(self._prefix).partition("/")[0]
                async for page in store.list(self._prefix or None, offset=f"{self._prefix}{_FIRST}", chunk_size=_PAGE)
                for path, _, _ in map(_object, page)
            }

    async def find(self, name: str) -> StoredModel | None:
        """The model, from a listing of its folder; None if it has no files."""
        folder, files = f"{self._prefix}{name}/", []
        try:
            async with self._request("listed") as store:
                async for page in store.list(folder, chunk_size=_PAGE):
                    files += [StoredFile(path[len(folder) :], size, tag) for path, size, tag in map(_object, page)]
        except StoreError as error:
            if not error.bad_object:
                raise
            return StoredModel(name, (), f"model '{name}' has an object that can't be a file: {error.bad_object}")
        return describe_model(name, files) if files else None

    async def read(self, model: str, file: StoredFile, start: int, end: int) -> memoryview:
        """The bytes of a file from `start` to before `end`, if the file still has the listed tag."""
        path = f"{self._prefix}{model}/{file.path}"
        options: dict[str, Any] = {"range": (start, end)}
        if not file.tag.startswith("@"):
            options["if_match"] = file.tag
        async with self._request(f"read: object '{path}'") as store:
            result = await store.get_async(path, options=options)
            content = memoryview(await result.bytes_async())
        if len(content) != end - start:
            message = f"the store sent {len(content)} bytes of object '{path}' instead of {end - start}"
            raise StoreError(f"model repository {self.name} can't be read: {message}", is_transient=True)
        return content

    async def subscribe(self, on_change: Callable[[str], None]) -> bool:
        """False: an object store has to be listed."""
        return False

    @asynccontextmanager
    async def _request(self, done: str) -> AsyncIterator[Any]:
        """The opened store for one request, whose errors become StoreErrors: the repository "can't be `done`"."""
        import obstore

        try:
            if self._store is None:
                self._store = await asyncio.to_thread(open_store, self._address, self._timeouts)
            async with asyncio.timeout(self._timeouts.total_s):
                yield self._store
        except TimeoutError as error:
            message = f"the store did not complete a request within {self._timeouts.total_s:g} s"
            raise StoreError(f"model repository {self.name} can't be {done}: {message}", is_transient=True) from error
        except (obstore.exceptions.BaseError, OSError) as error:
            raise self._explained(error, done, obstore) from error

    def _explained(self, error: Exception, done: str, obstore: ModuleType) -> StoreError:
        text, _, details = str(error).partition("\n\nDebug source")
        code = found[1] if (found := _CODE.search(text)) else ""
        status = found[1] if (found := _STATUS.search(text)) else ""
        address, kinds = self._address, obstore.exceptions
        has_changed = isinstance(error, (kinds.PreconditionError, FileNotFoundError)) and code not in _NO_BUCKET
        is_denied = isinstance(error, (kinds.PermissionDeniedError, kinds.UnauthenticatedError)) or status in (
            "401",
            "403",
        )
        is_transient = False
        bad_object = text.strip() if isinstance(error, kinds.InvalidPathError) else ""
        noun = "container" if address.kind == "as" else "bucket"
        if code in _NO_BUCKET or (status == "404" and done == "listed"):
            reason = f"{noun} '{address.bucket}' does not exist"
        elif _lacks_credentials(text):
            self._store = None
            reason = f"no credentials were found: {_HINTS[address.kind]}, or TRITON_CLOUD_CREDENTIAL_PATH"
        elif is_denied:
            self._store = None
            what = f" ({code})" if code else ""
            reason = (
                f"the store denies access{what}: check the credentials and their permission to list and read {noun} "
            )
            reason += f"'{address.bucket}'"
        elif bad_object:
            reason = f"{bad_object}; rename or remove that object"
        elif has_changed:
            reason = "it was replaced or removed since it was listed"
        else:
            is_transient = True
            reason = _failure(text, details)
        message = f"model repository {self.name} can't be {done}: {reason}"
        return StoreError(message, is_transient, has_changed, bad_object)


def open_store(address: StoreAddress, timeouts: StoreTimeouts) -> Any:
    """The library's store for an address. Blocking; sends no request. Raises StoreError for invalid settings."""
    import obstore
    from obstore import store as stores

    try:
        access = read_access(address)
    except WeirError as error:
        raise StoreError(error.message) from error
    options: dict[str, Any] = {
        "client_options": {
            "allow_http": True,  # an endpoint says by itself whether it has TLS; the clouds' own have
            "connect_timeout": timedelta(seconds=timeouts.connect_s),
            "read_timeout": timedelta(seconds=timeouts.stall_s),
            "timeout": timedelta(seconds=timeouts.total_s),
        },
        "retry_config": {"max_retries": timeouts.retries, "retry_timeout": timedelta(seconds=timeouts.total_s)},
    }
    try:
        if access.keys is not None:
            options["credential_provider"] = _key_provider(access)
        kinds: dict[str, Any] = {"s3": stores.S3Store, "gs": stores.GCSStore, "as": stores.AzureStore}
        return kinds[address.kind](address.bucket, config={**access.options}, **options)
    except (obstore.exceptions.BaseError, ValueError, OSError) as error:
        reason = str(error).partition("\n")[0][:300]
        raise StoreError(f"model repository {address.text} can't be opened: {reason}") from error


def _key_provider(access: StoreAccess) -> Any:
    """The keys as a callback: keys given as options would be mixed with others of the environment."""
    keys = access.keys
    assert keys is not None  # noqa: S101 - checked by the caller
    credential = {
        "access_key_id": keys.key_id,
        "secret_access_key": keys.secret_key,
        "token": keys.session_token or None,
        "expires_at": None,
    }
    return lambda: credential


def _failure(text: str, details: str) -> str:
    """The cause of an error in one line, without times, which would make each error another, and without the URL's query,
    which may have a token.
    """
    cause = text.rpartition(" - ")[2].partition(": <")[0].partition("\n")[0]
    system = _CAUSE.search(details)
    url = _URL.search(text)
    place = f"{url[1]}: " if url is not None else ""
    return _QUERY.sub("", f"{place}{system[1] if system is not None else cause}")[:300]


def _lacks_credentials(text: str) -> bool:
    """Whether the library looked for the identity of the instance, its last resort, in vain."""
    return any(
        place in text
        for place in ("169.254.169.254", "169.254.170.2", "metadata.google.internal", "/metadata/identity", "[fd00:ec2")
    )


def _object(row: Mapping[str, Any]) -> tuple[str, int, str]:
    """(path, size, tag) of a row of a listing."""
    return row["path"], row["size"], row["e_tag"] or f"@{row['last_modified'].isoformat()}"

"""Mirrors of repositories: what is downloaded, in which order, how it is verified, and what a failing store does."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.waiting import eventually
from weir.repository.layout import ModelRepository
from weir.repository.stores.store import StoredFile, StoredModel, StoreError, group_models
from weir.worker.lifecycle import downloads, model_cache
from weir.worker.lifecycle import mirror as mirrors
from weir.worker.lifecycle.downloads import DownloadProgress, Downloads
from weir.worker.lifecycle.mirror import RepositoryMirror
from weir.worker.lifecycle.model_cache import ModelCache

Tag = Callable[[bytes], str]


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RETRY_S", "SETTLE_S"):
        monkeypatch.setattr(mirrors, name, 0.01)
    monkeypatch.setattr(downloads, "RANGE_BYTES", 10)


def md5(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


def found(folder: Path, pattern: str) -> list[Path]:
    return list(folder.glob(pattern))


def len_tag(content: bytes) -> str:
    return f"@{len(content)}"


class Store:
    """A store in memory. `error` fails all requests, `spoil` changes what is read; `reads` are (path, start) in order."""

    name = "s3://b/models"

    def __init__(self, tag: Tag = md5) -> None:
        self.objects: dict[str, bytes] = {}
        self.error: Exception | None = None
        self.spoil: Callable[[bytes], bytes] = bytes
        self.reads: list[tuple[str, int]] = []
        self.in_flight = self.most_in_flight = 0
        self.listings = 0
        self.reports = False
        self.hold = asyncio.Event()
        self.hold.set()
        self.listing = asyncio.Event()
        self.listing.set()
        self._tag = tag

    async def models(self) -> dict[str, StoredModel]:
        listed = self._list()
        await self.listing.wait()
        return listed

    async def find(self, name: str) -> StoredModel | None:
        return self._list().get(name)

    def _list(self) -> dict[str, StoredModel]:
        self.listings += 1
        self._check()
        return group_models(StoredFile(path, len(data), self._tag(data)) for path, data in self.objects.items())

    async def subscribe(self, on_change: Callable[[str], None]) -> bool:
        self.on_change = on_change
        return self.reports

    async def read(self, model: str, file: StoredFile, start: int, end: int) -> memoryview:
        self.reads.append((f"{model}/{file.path}", start))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(0)
            await self.hold.wait()
            self._check()
            content = self.objects.get(f"{model}/{file.path}")
            if content is None or self._tag(content) != file.tag:
                raise StoreError("it was replaced", has_changed=True)
            return memoryview(self.spoil(content[start:end]))
        finally:
            self.in_flight -= 1

    def _check(self) -> None:
        if self.error is not None:
            raise self.error


def opened(
    store: Store, folder: Path, poll_s: float | None = None, limit_bytes: int = 0
) -> tuple[RepositoryMirror, ModelRepository]:
    cache = ModelCache(store.name, folder, limit_bytes)
    mirror = RepositoryMirror(store, cache, Downloads(), poll_s is not None, poll_s)
    return mirror, ModelRepository([cache.models])


async def fetched(store: Store, cache: Path) -> tuple[RepositoryMirror, ModelRepository]:
    """A mirror that has fetched everything."""
    mirror, repository = opened(store, cache)
    await mirror.start()
    await asyncio.gather(*(mirror.refresh(name, looks=False) for name in mirror.pending()))
    return mirror, repository


@asynccontextmanager
async def following(mirror: RepositoryMirror) -> AsyncIterator[list[set[str]]]:
    """The mirror while it follows changes; yields the reports."""
    reports: list[set[str]] = []

    async def report(names: Collection[str]) -> None:
        reports.append(set(names))

    async with asyncio.TaskGroup() as background:
        mirror.follow(background, report)
        yield reports
        await mirror.stop()


async def test_models_are_copied_in_ranges_and_only_once(tmp_path: Path) -> None:
    store = Store()
    store.objects = {"m/config.pbtxt": b"a", "m/1/model.onnx": b"0123456789" * 9 + b"x", "m/1/empty": b""}
    mirror, repository = await fetched(store, tmp_path)
    assert (repository.find("m").path / "1" / "model.onnx").read_bytes() == store.objects["m/1/model.onnx"]
    assert (repository.find("m").path / "1" / "empty").read_bytes() == b""
    assert sorted(start for path, start in store.reads if path == "m/1/model.onnx") == list(range(0, 91, 10))
    assert mirror.pending() == {}
    # Another worker of the host, and one that starts later, find it in the cache.
    store.reads.clear()
    await fetched(store, tmp_path)
    assert store.reads == []
    # What is spoilt in the cache is downloaded again.
    (content,) = found(tmp_path, "store-*/m/*/files/config.pbtxt")
    content.chmod(0o600)
    content.write_bytes(b"b")
    _, repository = await fetched(store, tmp_path)
    assert store.reads == [("m/config.pbtxt", 0)]
    assert (repository.find("m").path / "config.pbtxt").read_bytes() == b"a"


async def test_memory_is_bounded_and_the_smallest_models_come_first(tmp_path: Path) -> None:
    store = Store()
    for number in range(20):
        store.objects[f"m{number}/1/x"] = b"x" * (100 + number)
    store.objects["tiny/1/x"] = b"x"
    mirror, _ = opened(store, tmp_path)
    await mirror.start()
    assert next(iter(mirror.pending())) == "tiny"
    await asyncio.gather(*(mirror.refresh(name, looks=False) for name in mirror.pending()))
    assert store.most_in_flight <= downloads.RANGES_AT_A_TIME
    assert mirror.pending() == {}


async def test_the_smallest_model_is_among_the_files_that_are_read_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are admitted together are read in any order, so all of them are held at their first ranges."""
    monkeypatch.setattr(downloads, "RANGES_AT_A_TIME", 1000)
    store = Store()
    for number in range(20):
        store.objects[f"m{number}/1/x"] = b"x" * (100 + number)
    store.objects["tiny/1/x"] = b"x"
    mirror, _ = opened(store, tmp_path)
    await mirror.start()
    store.hold.clear()
    reading = asyncio.gather(*(mirror.refresh(name, looks=False) for name in mirror.pending()))
    await eventually(lambda: len({path for path, _ in store.reads}) == downloads.FILES_AT_A_TIME)
    assert "tiny/1/x" in {path for path, _ in store.reads}
    store.hold.set()
    await reading


@pytest.mark.parametrize(
    ("tag", "content", "downloaded"),
    [
        (md5, b"0123456789", {"m/1/b"}),
        (md5, b"wrong byte", {"m/1/a", "m/1/b"}),
        (len_tag, b"wrong length", {"m/1/a", "m/1/b"}),
    ],
)
async def test_complete_files_of_a_download_that_was_killed_are_used(
    tmp_path: Path, tag: Tag, content: bytes, downloaded: set[str]
) -> None:
    store = Store(tag)
    store.objects = {"m/1/a": b"0123456789", "m/1/b": b"0123456789" * 5}
    mirror, _ = opened(store, tmp_path)
    await mirror.start()
    store.hold.clear()
    fetching = asyncio.create_task(mirror.refresh("m", looks=False))
    await eventually(lambda: len(store.reads) == 6)
    fetching.cancel()
    await asyncio.wait([fetching])
    # It had the first file, and some of the second.
    (folder,) = found(tmp_path, "store-*/m/*/files")
    (folder / "1" / "a").write_bytes(content)
    store.hold.set()
    store.reads.clear()
    _, repository = await fetched(store, tmp_path)
    assert {path for path, _ in store.reads} == downloaded
    assert (repository.find("m").path / "1" / "a").read_bytes() == b"0123456789"
    assert (repository.find("m").path / "1" / "b").read_bytes() == b"0123456789" * 5


async def test_a_content_that_differs_from_its_checksum_is_rejected(tmp_path: Path) -> None:
    store = Store()
    store.objects["m/1/x"] = b"content"
    noise = iter([b"1", b"2", b"3", b"4", b"5", b"6"])
    store.spoil = lambda content: content[:-1] + next(noise)
    mirror, repository = await fetched(store, tmp_path)
    assert "two downloads of object 'm/1/x' differ" in mirror.problems["m"]
    assert repository.scan() == {}
    store.spoil = bytes
    await mirror.refresh("m")
    assert (mirror.problems, list(repository.scan())) == ({}, ["m"])


async def test_a_tag_that_only_looks_like_a_checksum_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tag=lambda content: md5(b"encrypted" + content))
    store.objects = {"m/1/x": b"content", "n/1/x": b"other"}
    mirror, repository = await fetched(store, tmp_path)
    assert list(repository.scan()) == ["m", "n"]
    store.objects["o/1/x"] = b"third"
    store.reads.clear()
    await mirror.refresh("o")
    assert store.reads == [("o/1/x", 0)], "known after the first object"


async def test_what_the_store_has_no_room_for_here_is_a_problem_of_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    store.objects = {"a/1/x": b"a" * 50, "b/1/x": b"b" * 60, "c/1/x": b"c" * 500}
    mirror, repository = opened(store, tmp_path, limit_bytes=150)
    await mirror.start()
    await asyncio.gather(*(mirror.refresh(name, looks=False) for name in mirror.pending()))
    assert list(repository.scan()) == ["a", "b"]
    message = "the model cache is full: it has no room for 500 bytes within --model-cache-byte-size=150"
    assert mirror.problems == {"c": message}
    # What no model uses any more makes room.
    monkeypatch.setattr(model_cache, "_READ_S", -60.0)
    store.objects = {"a/1/x": b"a" * 50, "d/1/x": b"d" * 90}
    await mirror.refresh("b")
    await mirror.refresh("d")
    assert mirror.problems == {"c": message}
    assert {path.name for path in repository.paths[0].iterdir()} == {"a", "d"}
    assert sorted(path.parents[1].name for path in found(tmp_path, "store-*/*/*/files")) == ["a", "d"]


async def test_changes_are_followed_without_downloads_of_what_is_the_same(tmp_path: Path) -> None:
    store = Store()
    store.objects = {"m/config.pbtxt": b"a", "m/1/x": b"1", "n/1/x": b"n"}
    mirror, repository = opened(store, tmp_path, 0.01)
    await mirror.start()
    async with following(mirror) as reports:
        await eventually(lambda: set().union(*reports) == {"m", "n"})
        store.reads.clear()
        listings = store.listings
        await eventually(lambda: store.listings > listings + 3)
        assert store.reads == []
        store.objects["m/1/x"] = b"2"
        del store.objects["n/1/x"]
        reports.clear()
        await eventually(lambda: set().union(*reports) == {"m", "n"})
        assert store.reads == [("m/1/x", 0)]
        assert list(repository.scan()) == ["m"]
        assert (repository.find("m").path / "1" / "x").read_bytes() == b"2"


async def test_a_model_that_still_changes_is_fetched_when_it_has_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    mirror, _ = opened(store, tmp_path, 0.01)
    await mirror.start()
    monkeypatch.setattr(mirrors, "SETTLE_S", 0.2)
    async with following(mirror) as reports:
        for number in range(5):
            store.objects["m/1/x"] = str(number).encode()
            listings = store.listings
            await eventually(lambda seen=listings: store.listings > seen + 3)  # type: ignore[misc]
        await eventually(lambda: reports == [{"m"}])
    assert len(store.reads) == 1


async def test_a_failing_store_leaves_models_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    store.objects = {"m/1/x": b"1"}
    mirror, repository = opened(store, tmp_path, 0.01)
    await mirror.start()
    async with following(mirror) as reports:
        await eventually(lambda: reports)
        store.error = StoreError("model repository s3://b/models can't be listed: away", is_transient=True)
        await eventually(lambda: mirror.failure)
        store.objects = {}
        listings = store.listings
        await eventually(lambda: store.listings > listings + 3)
        assert list(repository.scan()) == ["m"]
        await mirror.refresh("m")
        assert list(repository.scan()) == ["m"]
        assert caplog.text.count("its models stay as they are until it can be read") == 1
        store.error = None
        await eventually(lambda: repository.scan() == {})
        assert mirror.failure == ""
    # Without the store, a worker starts with what was fetched before, and knows that the store was readable once.
    store.objects = {"m/1/x": b"1"}
    await fetched(store, tmp_path)
    store.error = StoreError("away")
    mirror, repository = await fetched(store, tmp_path)
    assert list(repository.scan()) == ["m"]
    assert (mirror.failure, mirror.is_unusable) == ("away", False)
    never, _ = await fetched(store, tmp_path / "other")
    assert never.is_unusable


async def test_models_that_could_not_be_fetched_at_the_start_come_later(tmp_path: Path) -> None:
    store = Store()
    store.objects = {"m/1/x": b"1", "n/1/x": b"n"}
    mirror, repository = opened(store, tmp_path)
    await mirror.start()
    await mirror.refresh("n", looks=False)
    store.error = StoreError("away", is_transient=True)
    await mirror.refresh("m", looks=False)
    assert mirror.problems == {"m": "away"}
    assert await mirror.contents(looks=False) == {"m": "away", "n": ""}
    async with following(mirror) as reports:
        store.error = None
        store.objects["n/1/x"] = b"changed"
        await eventually(lambda: reports)
    assert reports == [{"m"}]
    assert list(repository.scan()) == ["m", "n"]
    assert (repository.find("n").path / "1" / "x").read_bytes() == b"n", "changes are not followed"


@pytest.mark.parametrize("error", [KeyError("tag"), RecursionError(), StoreError("denied")])
async def test_one_model_that_fails_does_not_affect_others(tmp_path: Path, error: Exception) -> None:
    store = Store()
    store.objects = {"bad name/1/x": b"1", "m/1/x": b"1", "broken/1/x": b"2"}

    def spoil(content: bytes) -> bytes:
        if content == b"2":
            raise error
        return content

    store.spoil = spoil
    mirror, repository = await fetched(store, tmp_path)
    assert list(repository.scan()) == ["m"]
    assert sorted(mirror.problems) == ["bad name", "broken"]
    for name in ("../m", "a/b", ""):
        await mirror.refresh(name)
    assert sorted(mirror.problems) == ["bad name", "broken"], "names come from clients"


async def test_a_store_that_hangs_delays_a_start_or_a_load_for_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    store.objects = {"m/1/x": b"1"}
    mirror, _ = await fetched(store, tmp_path)
    monkeypatch.setattr(mirrors, "START_TIMEOUT_S", 0.01)
    monkeypatch.setattr(mirrors, "LOOK_TIMEOUT_S", 0.01)

    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(store, "models", hang)
    monkeypatch.setattr(store, "find", hang)
    await mirror.refresh("m")
    assert mirror.problems == {}
    monkeypatch.setattr(mirrors, "LISTING_AGE_S", -1.0)
    assert await mirror.contents(looks=True) == {"m": ""}
    second, _ = opened(store, tmp_path)
    await second.start()
    assert second.failure == "model repository s3://b/models can't be listed: the store did not answer in 0.01 s"
    assert list(second.pending()) == ["m"]


async def test_large_models_are_downloaded_one_after_another_beside_small_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "SMALL_MODEL_BYTES", 10)
    store = Store()
    store.objects = {"large1/1/x": b"1" * 11, "large2/1/x": b"2" * 12, "small1/1/x": b"1", "small2/1/x": b"2"}
    mirror, _ = opened(store, tmp_path)
    await mirror.start()
    store.hold.clear()
    fetching = [asyncio.create_task(mirror.refresh(name, looks=False)) for name in mirror.pending()]
    await eventually(lambda: len(store.reads) == 4)
    assert {path for path, _ in store.reads} == {"small1/1/x", "small2/1/x", "large1/1/x"}
    store.hold.set()
    await asyncio.gather(*fetching)
    assert mirror.pending() == {}


async def test_what_a_store_reports_is_fetched_without_polling(tmp_path: Path) -> None:
    store = Store()
    store.reports = True
    store.objects = {"m/1/x": b"1"}
    mirror, repository = opened(store, tmp_path, 600)
    await mirror.start()
    store.objects["early/1/x"] = b"1"
    async with following(mirror) as reports:
        await eventually(lambda: reports and set().union(*reports) == {"m", "early"})
        reports.clear()
        store.objects["m/1/x"] = b"2"
        store.on_change("m")
        del store.objects["early/1/x"]
        store.on_change("early")
        await eventually(lambda: reports and set().union(*reports) == {"m", "early"})
        assert list(repository.scan()) == ["m"]
        assert (repository.find("m").path / "1" / "x").read_bytes() == b"2"
        # After a lost connection any may have changed, and the first attempt may fail.
        store.objects["n/1/x"] = b"1"
        store.error = StoreError("away", is_transient=True)
        store.on_change("")
        await eventually(lambda: mirror.failure)
        store.error = None
        await eventually(lambda: list(repository.scan()) == ["m", "n"])
    store.on_change("m")


async def test_a_listing_does_not_undo_what_was_read_since_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    store.objects = {"m/1/x": b"1", "n/1/x": b"1"}
    mirror, repository = await fetched(store, tmp_path)
    monkeypatch.setattr(mirrors, "LISTING_AGE_S", -1.0)
    store.listing.clear()
    listings = store.listings
    listing = asyncio.create_task(mirror.contents(looks=True))
    await eventually(lambda: store.listings > listings)
    store.objects = {"m/1/x": b"2"}
    await mirror.refresh("m")
    await mirror.refresh("n")
    store.listing.set()
    assert await listing == {"m": ""}
    assert mirror.pending() == {}
    assert list(repository.scan()) == ["m"]


def test_progress_is_logged_while_downloads_take_long(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    caplog.set_level("INFO")
    progress = DownloadProgress(lambda: now_s, 5)
    with progress.expecting(30_000_000):
        progress.advance(10_000_000)
        assert not caplog.messages
        now_s = 10.0
        progress.advance(10_000_000)
        assert caplog.messages == ["fetching models: 0 of 1, 20 of 30 MB, 2.0 MB/s"]
        progress.advance(10_000_000)
    assert caplog.messages[1:] == ["fetched models: 1 of 1, 30 of 30 MB, 3.0 MB/s"]
    assert not progress.is_active
    with progress.expecting(5):
        progress.advance(5)
    assert len(caplog.messages) == 2, "short downloads are not reported"

"""`ModelCache`: models replaced in one step, files verified before they are used again, nothing written outside."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import pytest

from weir.repository.layout import ModelRepository, folder_fingerprint
from weir.repository.stores.store import FOLDER_MARK, StoredFile, StoredModel
from weir.schemas.core.errors import WeirError
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.model_control import PushedFile, PushedModel
from weir.worker.lifecycle import model_cache
from weir.worker.lifecycle.model_cache import SHA256_TAG, ModelCache

ADDRESS = "nats://shop"


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def install(cache: ModelCache, name: str = "m", **contents: bytes) -> set[str]:
    """Installs a model of these files; `a__b` is `a/b`. Returns the files that were not there yet."""
    files = {file.replace("__", "/"): content for file, content in contents.items()}
    return install_files(cache, name, files)


def install_files(cache: ModelCache, name: str, files: dict[str, bytes]) -> set[str]:
    digests = {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}
    listed = tuple(StoredFile(path, len(content), SHA256_TAG + digests[path]) for path, content in files.items())
    lock = cache.lock(name)
    assert lock is not None
    with lock:
        draft = cache.begin(StoredModel(name, listed))
        missing = draft.missing
        for file in missing:
            draft.part(file).write_bytes(files[file.path])
            draft.place(file, digests[file.path])
        cache.install(draft)
    return {file.path for file in missing}


def test_a_model_replaces_the_old_one_in_one_step(scratch: Path) -> None:
    cache = ModelCache(ADDRESS)
    repository = ModelRepository([cache.models])
    install(cache, c=b"a", **{"1__x": b"1"})
    first = repository.find("m")
    assert first.versions == (1,)
    assert (first.path / "1" / "x").read_bytes() == b"1"
    before = folder_fingerprint(first)
    install(cache, c=b"a", **{"1__x": b"1"})
    assert folder_fingerprint(repository.find("m")) == before, "the same contents look the same"
    assert install(cache, c=b"a", **{"1__x": b"2", "2__x": b"1"}) == {"1/x", "2/x"}
    after = folder_fingerprint(repository.find("m"))
    assert after.shared == before.shared
    assert after.versions[2] == before.versions[1]
    assert after.versions[1] != before.versions[1]
    cache.remove("m")
    assert repository.scan() == {}
    cache.close()
    assert not list(scratch.iterdir())


def test_replaced_snapshots_are_removed_with_a_later_change(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ModelCache(ADDRESS)
    install(cache, a=b"1")
    former = (cache.models / "m" / "a").resolve()
    cache.remove("m")
    assert former.exists(), "it may still be read"
    monkeypatch.setattr(model_cache, "_READ_S", -60.0)
    lock = cache.lock("m")
    assert lock is not None
    install(cache, "n", b=b"2")
    assert former.exists(), "another worker is about to use it"
    lock.close()
    install(cache, "n", b=b"3")
    assert not former.exists()
    assert (cache.models / "n" / "b").read_bytes() == b"3"
    cache.close()


def test_cached_contents_are_verified_before_they_are_used_again(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    cache = ModelCache(ADDRESS, folder)
    assert install(cache, a=b"a", b=b"b") == {"a", "b"}
    spoilt = (cache.models / "m" / "b").resolve()
    cache.close()
    os.chmod(spoilt, 0o644)
    spoilt.write_bytes(b"x")
    again = ModelCache(ADDRESS, folder)
    assert install(again, a=b"a", b=b"b") == {"b"}
    assert (again.models / "m" / "b").read_bytes() == b"b"
    again.close()
    assert [path.name.partition("-")[0] for path in folder.iterdir()] == ["store"]


def test_snapshots_that_workers_have_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ModelCache(ADDRESS, tmp_path, 10), ModelCache(ADDRESS, tmp_path, 10)
    assert install(first, a=b"12345") == {"a"}
    assert install(second, a=b"12345") == set()
    first.remove("m")
    monkeypatch.setattr(model_cache, "_READ_S", -60.0)
    with pytest.raises(WeirError, match="the model cache is full: it has no room for 10 bytes within"):
        install(first, "n", a=b"0123456789")
    assert (second.models / "m" / "a").read_bytes() == b"12345"
    second.close()
    install(first, "n", a=b"0123456789")
    first.close()
    # What was used until a worker was killed is not old.
    for snapshot in tmp_path.glob("store-*/n/*/"):
        os.utime(snapshot, (0, 0))
    killed = tmp_path / f"{model_cache.PREFIX}killed"
    (killed / "models").mkdir(parents=True)
    (killed / ".lock").touch()
    (files,) = tmp_path.glob("store-*/n/*/files")
    (killed / "models" / "n").symlink_to(files)
    ModelCache(ADDRESS, tmp_path).close()
    assert files.exists()
    assert not killed.exists()
    os.utime(files.parent, (0, 0))
    ModelCache(ADDRESS, tmp_path).close()
    assert not files.exists()


def test_older_snapshots_of_a_model_make_room_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ModelCache(ADDRESS, tmp_path, 12)
    install(cache, a=b"11111", c=b"1")
    install(cache, a=b"22222", c=b"1")
    with pytest.raises(WeirError, match="no room for 5 bytes"):
        install(cache, a=b"33333", c=b"1")
    monkeypatch.setattr(model_cache, "_READ_S", -60.0)
    assert install(cache, a=b"33333", c=b"1") == {"a"}
    assert (cache.models / "m" / "a").read_bytes() == b"33333"
    complete = tmp_path.glob("store-*/m/*/snapshot.json")
    assert {(path.parent / "files" / "a").read_bytes() for path in complete} == {b"22222", b"33333"}
    cache.close()


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "", ".", "a//b", "a/", "a\\b", "a\0b", "a\nb", "x" * 2000])
def test_paths_outside_of_the_folder_are_rejected(tmp_path: Path, path: str) -> None:
    cache = ModelCache(ADDRESS)
    evil = PushedModel("m", (PushedFile(path, 1, hashlib.sha256(b"a").hexdigest()),))
    with pytest.raises(MalformedMessage):
        PushedModel.unpack(evil.pack())
    with pytest.raises(WeirError, match="a path outside of its folder"):
        install_files(cache, "m", {path: b"a"})
    cache.close()
    assert not list(tmp_path.iterdir())


def test_a_conflict_of_file_and_folder_leaves_the_old_model() -> None:
    cache = ModelCache(ADDRESS)
    install(cache, a=b"a")
    with pytest.raises(OSError, match=r"."):
        install(cache, **{"1": b"a", "1__x": b"a"})
    assert [path.name for path in (cache.models / "m").iterdir()] == ["a"]
    cache.close()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc0",
        PushedModel("m", ()).pack()[:-1],
        PushedModel("m", (PushedFile("a", -1, "0" * 64),)).pack(),
    ]
    + [PushedModel("m", (PushedFile("a", 1, digest),)).pack() for digest in ("", "0" * 63, "../" + "0" * 61, "G" * 64)]
    + [PushedModel("m", (PushedFile("a", 1, "0" * 64),) * 2).pack()],
)
def test_malformed_manifests_are_rejected(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        PushedModel.unpack(data)


def test_folders_without_files_are_there() -> None:
    """The version of an ensemble is one."""
    cache = ModelCache(ADDRESS)
    marks = {f"{folder}/{FOLDER_MARK}": b"" for folder in ("1", "2/inner")}
    assert install_files(cache, "chain", marks) == set()
    assert list((cache.models / "chain" / "1").iterdir()) == []
    assert (cache.models / "chain" / "2" / "inner").is_dir()
    cache.close()

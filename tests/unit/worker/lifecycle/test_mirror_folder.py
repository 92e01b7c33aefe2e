"""`MirrorFolder`: contents under their hashes, models replaced in one step, nothing written outside."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import pytest

from weir.repository.layout import ModelRepository, folder_fingerprint
from weir.schemas.core.errors import WeirError
from weir.schemas.wire.codec import MalformedMessage
from weir.schemas.wire.model_control import PushedFile, PushedModel
from weir.worker.lifecycle import mirror_folder
from weir.worker.lifecycle.mirror_folder import MirrorFolder


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def received(folder: MirrorFolder, **contents: bytes) -> PushedModel:
    """A model of these files, whose contents are stored; `a__b` is `a/b`."""
    files = []
    for name, content in contents.items():
        files.append(PushedFile(name.replace("__", "/"), len(content), hashlib.sha256(content).hexdigest()))
        if not folder.has(files[-1]):
            incoming = folder.receive(files[-1])
            incoming.write(content)
            incoming.finish()
    return PushedModel("m", tuple(files))


def test_a_pushed_model_replaces_the_old_one_in_one_step(scratch: Path) -> None:
    folder = MirrorFolder()
    repository = ModelRepository([folder.models])
    folder.install(received(folder, c=b"a", **{"1__x": b"1"}))
    first = repository.find("m")
    assert first.versions == (1,)
    assert (first.path / "1" / "x").read_bytes() == b"1"
    before = folder_fingerprint(first)
    folder.install(received(folder, c=b"a", **{"1__x": b"1"}))
    assert folder_fingerprint(repository.find("m")) == before, "the same contents look the same"
    folder.install(received(folder, c=b"a", **{"1__x": b"2", "2__x": b"1"}))
    after = folder_fingerprint(repository.find("m"))
    assert after.shared == before.shared
    assert after.versions[2] == before.versions[1]
    assert after.versions[1] != before.versions[1]
    folder.remove("m")
    assert repository.scan() == {}
    folder.close()
    assert not list(scratch.iterdir())


def test_contents_of_an_incomplete_model_are_kept_when_other_models_change() -> None:
    folder = MirrorFolder()
    small = received(folder, a=b"small")
    folder.install(small)
    large = PushedModel("large", (PushedFile("b", 5, hashlib.sha256(b"large").hexdigest()),))
    with folder.keeping(large):
        received(folder, b=b"large")
        folder.install(received(folder, a=b"other"))
        assert folder.has(large.files[0])
    folder.remove("m")
    assert not folder.has(large.files[0]), "what no model has, and none is to have, is not kept"
    folder.close()


def test_replaced_folders_are_removed_with_a_later_change(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = MirrorFolder()
    model = received(folder, a=b"1")
    folder.install(model)
    folder.remove("m")
    assert folder.has(model.files[0]), "it may still be read"
    monkeypatch.setattr(mirror_folder, "_FORMER_S", 0.0)
    folder.install(PushedModel("n", received(folder, b=b"2").files))
    assert not folder.has(model.files[0])
    folder.close()


def test_content_with_another_hash_is_rejected() -> None:
    folder = MirrorFolder()
    file = PushedFile("1/x", 3, hashlib.sha256(b"abc").hexdigest())
    incoming = folder.receive(file)
    incoming.write(b"abd")
    with pytest.raises(WeirError, match="the content of file '1/x' does not match the hash of the pushed file"):
        incoming.finish()
    assert not folder.has(file)
    with pytest.raises(OSError, match=r"."):
        folder.install(PushedModel("m", (file,)))
    assert ModelRepository([folder.models]).scan() == {}
    folder.close()


def test_cached_contents_are_verified_before_they_are_used_again(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = MirrorFolder(cache)
    model = received(folder, a=b"a", b=b"b")
    folder.install(model)
    folder.close()
    (spoilt,) = [path for path in (cache / "contents").iterdir() if path.read_bytes() == b"b"]
    os.chmod(spoilt, 0o644)
    spoilt.write_bytes(b"x")
    again = MirrorFolder(cache)
    assert [again.has(file) for file in model.files] == [True, False]
    again.close()
    assert {path.name for path in cache.iterdir()} == {"contents"}


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "", ".", "a//b", "a/", "a\\b", "a\0b", "a\nb", "x" * 2000])
def test_paths_outside_of_the_folder_are_rejected(tmp_path: Path, path: str) -> None:
    folder = MirrorFolder()
    digest = received(folder, a=b"a").files[0].digest
    evil = PushedModel("m", (PushedFile(path, 1, digest),))
    with pytest.raises(MalformedMessage):
        PushedModel.unpack(evil.pack())
    with pytest.raises(WeirError):
        folder.install(evil)
    with pytest.raises(WeirError):
        folder.install(PushedModel("../m", (PushedFile("a", 1, digest),)))
    folder.close()
    assert not list(tmp_path.iterdir())


def test_a_conflict_of_file_and_folder_leaves_the_old_model(tmp_path: Path) -> None:
    folder = MirrorFolder()
    good = received(folder, a=b"a")
    folder.install(good)
    digest = good.files[0].digest
    with pytest.raises(OSError, match=r"."):
        folder.install(PushedModel("m", (PushedFile("1", 1, digest), PushedFile("1/x", 1, digest))))
    assert [path.name for path in (folder.models / "m").iterdir()] == ["a"]
    folder.close()


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
    folder = MirrorFolder()
    folder.install(PushedModel("chain", (), ("1", "2/inner")))
    assert (folder.models / "chain" / "1").is_dir()
    assert (folder.models / "chain" / "2" / "inner").is_dir()
    with pytest.raises(WeirError, match="a path outside of its folder"):
        folder.install(PushedModel("chain", (), ("../escaped",)))

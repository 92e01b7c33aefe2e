from __future__ import annotations

import os
from pathlib import Path

import pytest

from weir.repository import content_digests
from weir.repository.content_digests import ContentDigests
from weir.repository.layout import ModelRepository, folder_fingerprint
from weir.schemas.config.model_config import ModelConfig

CONFIG = ModelConfig(name="net", backend="onnxruntime")


def written(folder: Path, content: bytes = b"weights", shared: bytes = b"cat") -> Path:
    (folder / "net" / "1").mkdir(parents=True)
    (folder / "net" / "1" / "model.onnx").write_bytes(content)
    (folder / "net" / "labels.txt").write_bytes(shared)
    return folder


def digest(folder: Path, digests: ContentDigests | None = None, config: ModelConfig = CONFIG) -> str:
    found = ModelRepository([folder]).find("net")
    return (digests or ContentDigests()).start(folder_fingerprint(found), 1, config).result(10)


def test_it_depends_on_contents_and_not_on_places_or_times(tmp_path: Path) -> None:
    here, there = written(tmp_path / "a"), written(tmp_path / "b")
    os.utime(there / "net" / "1" / "model.onnx", (1, 1))
    assert digest(here) == digest(there)
    assert digest(written(tmp_path / "c", b"Weights")) != digest(here), "of the same size"
    assert digest(written(tmp_path / "d", shared=b"dog")) != digest(here)
    assert digest(here, config=CONFIG.replace(max_batch_size=4)) != digest(here)
    (there / "net" / "1" / "model.onnx").rename(there / "net" / "1" / "other.onnx")
    assert digest(there) != digest(here)


def test_unchanged_files_are_read_once(tmp_path: Path) -> None:
    digests = ContentDigests()
    before = digest(written(tmp_path), digests)
    assert (digests.read_bytes, digest(tmp_path, digests), digests.read_bytes) == (10, before, 10)
    (tmp_path / "net" / "1" / "model.onnx").write_bytes(b"changed")
    assert digest(tmp_path, digests) != before
    assert digests.read_bytes == 17


def test_beyond_the_limit_size_and_time_stand_for_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_digests, "MAX_READ_BYTES", 6)
    digests = ContentDigests()
    before = digest(written(tmp_path), digests)
    assert digests.read_bytes == 0
    os.utime(tmp_path / "net" / "1" / "model.onnx", (1, 1))
    assert digest(tmp_path, digests) != before


def test_what_is_no_ordinary_file_is_not_read(tmp_path: Path) -> None:
    written(tmp_path)
    os.mkfifo(tmp_path / "net" / "1" / "pipe")
    assert digest(tmp_path)

"""What is read whole from a repository is bounded: a sparse file of gigabytes takes no room on disk."""

import os
import tracemalloc
from pathlib import Path

import pytest

from weir.repository.config_text import config_from_json
from weir.repository.layout import ModelRepository
from weir.repository.loading import read_config
from weir.repository.paths import MAX_CONFIG_BYTES, read_labels, read_small_file
from weir.repository.problems import ConfigProblem
from weir.schemas.core.errors import WeirError


def sparse(path: Path, size_bytes: int = 4 << 30) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size_bytes)
    return path


def test_a_file_of_just_the_allowed_size_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 1000)
    assert read_small_file(tmp_path / "file", 1000) == b"x" * 1000
    with pytest.raises(OSError, match="the file has 1000 bytes, at most 999 are allowed"):
        read_small_file(tmp_path / "file", 999)


def test_a_file_that_has_no_size_is_read_up_to_the_bound() -> None:
    # Files of the kernel have the size 0 whatever is in them.
    with pytest.raises(OSError, match="grew beyond 8 bytes"):
        read_small_file(Path("/proc/self/status"), 8)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_only_regular_files_are_read(tmp_path: Path, make) -> None:
    make(tmp_path / "file")
    with pytest.raises(OSError, match=r"not a regular file|directory"):
        read_small_file(tmp_path / "file", 10)


def test_a_configuration_of_4_gib_is_not_read(tmp_path: Path) -> None:
    sparse(tmp_path / "net" / "config.pbtxt")
    found = ModelRepository([tmp_path]).find("net")
    tracemalloc.start()
    with pytest.raises(WeirError, match=r"failed to read net/config.pbtxt: the file has 4294967296 bytes"):
        read_config(found)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_labels_of_4_gib_are_not_read(tmp_path: Path) -> None:
    sparse(tmp_path / "labels.txt")
    with pytest.raises(ConfigProblem, match=r"failed to read label file 'labels.txt': the file has 4294967296 bytes"):
        read_labels(tmp_path, "labels.txt")


def test_a_configuration_of_a_load_request_has_the_same_bound() -> None:
    with pytest.raises(WeirError, match="Invalid config override: it has 4194305 characters"):
        config_from_json("{" + " " * MAX_CONFIG_BYTES)

"""The archives for GPU machines without a package registry, and the environment of the check."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu import bundle, check
from benchmarks.gpu.check import environment
from weir.worker.devices.gpus import find_gpus


def entry(kind: int, architecture: int, content: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 1, 48, len(content)).ljust(28, b"\1") + struct.pack("<I", architecture)
    return header.ljust(48, b"\2") + content


def container(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


def test_code_for_other_gpus_is_blanked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = b"host code before", b"host code after!"
    section = (
        container(entry(2, 80, b"A" * 64), entry(2, 90, b"H" * 32)) + bytes(8) + container(entry(1, 90, b"Q" * 16))
    )
    library = tmp_path / "library.so"
    library.write_bytes(before + section + after)
    monkeypatch.setattr(bundle, "_fat_sections", lambda _: [(len(before), len(before) + len(section))])
    assert bundle.blank_other_gpus(library, 90) == 64 + 16
    content = library.read_bytes()
    assert (b"A" in content, b"Q" in content, content.count(b"H")) == (False, False, 32)
    assert content.startswith(before)
    assert content.endswith(after)
    assert len(content) == len(before + section + after)


def test_what_is_carried_is_locked() -> None:
    assert [package.partition("==")[0] for package in bundle.locked()] == bundle.CARRIED


def test_everything_that_weir_needs_is_carried_or_present() -> None:
    """A dependency that is new in pyproject.toml must not be missed on a machine that can't install it."""
    needed: set[str] = set()

    def add(text: str) -> None:
        requirement = Requirement(text)
        extras = [*requirement.extras, ""]
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": "", "python_version": "3.12"}):
            return
        if name in needed:
            return
        needed.add(name)
        for further in metadata.requires(name) or []:
            marker = Requirement(further).marker
            if marker is None or any(marker.evaluate({"extra": extra, "python_version": "3.12"}) for extra in extras):
                add(further.partition(";")[0])

    for dependency in tomllib.loads((bundle.ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        add(dependency)
    assert needed - set(bundle.CARRIED) - set(bundle.PRESENT) == set()
    assert set(bundle.CARRIED) & set(bundle.PRESENT) == set()


def test_what_was_unpacked_is_found_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "theirs")
    variables = environment(tmp_path)
    assert variables["PYTHONPATH"].split(":") == [str(tmp_path), str(bundle.ROOT), "theirs"]
    assert variables["PATH"].startswith(f"{tmp_path}/bin:")


def test_what_the_check_lacks_is_told_at_once() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", check.NEEDED], cwd=check.ROOT, capture_output=True, text=True, check=False
    )
    if find_gpus().gpus:
        assert ended.stdout.startswith("GPU 0: ")
    else:
        assert ended.returncode == 1
        assert ended.stderr.startswith("the GPU check needs a GPU: ")

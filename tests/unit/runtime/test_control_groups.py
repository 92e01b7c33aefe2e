"""The files of a process's control groups, in both versions and up to the root."""

from __future__ import annotations

from pathlib import Path

from weir.runtime.control_groups import limits_of


def write(folder: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (folder / "own").write_text(own)
    return folder / "cgroup", folder / "own"


def test_groups_up_to_the_root_that_have_all_files(tmp_path: Path) -> None:
    files = {"cpu/a/b/quota": "1", "cpu/a/b/period": "2", "cpu/a/quota": "3", "cpu/quota": "5", "cpu/period": "6"}
    places = write(tmp_path, "3:cpu:/a/b\n", files)
    assert list(limits_of("cpu", ("max",), ("quota", "period"), *places)) == [("1", "2"), ("5", "6")]


def test_both_versions_beside_each_other(tmp_path: Path) -> None:
    places = write(tmp_path, "3:cpu:/a\n0::/b\n", {"cpu/a/quota": "1", "unified/b/max": "2"})
    assert list(limits_of("cpu", ("max",), ("quota",), *places)) == [("1",), ("2",)]


def test_a_path_does_not_lead_out_of_the_mount(tmp_path: Path) -> None:
    (tmp_path / "quota").write_text("1")
    assert list(limits_of("cpu", ("quota",), ("quota",), *write(tmp_path, "3:cpu:/../..\n0::/../x\n", {}))) == []

"""Whose an output folder is, who writes there, and what paths jobs may name at all."""

from __future__ import annotations

import glob
from pathlib import Path

import pytest

from weir.jobs.records import folders
from weir.jobs.records.folders import MARKER, BatchRoots, OutputFolder, Uploads
from weir.jobs.records.record import JobSpec
from weir.schemas.core.errors import ErrorCode, WeirError


def test_a_folder_is_one_job_s_and_one_writer_s(tmp_path: Path) -> None:
    path = tmp_path / "a" / "out"
    first, second = OutputFolder(path, "batch-1"), OutputFolder(path, "batch-1")
    first.claim("input")
    with pytest.raises(WeirError) as refused:
        second.claim("input")
    assert refused.value.code is ErrorCode.UNAVAILABLE
    first.release()
    second.claim("input")
    second.release()
    with pytest.raises(WeirError, match="the input has changed"):
        first.claim("other input")
    with pytest.raises(WeirError, match="belongs to job batch-1"):
        OutputFolder(path, "batch-2").claim("input")
    first.claim("input")
    first.release()


def test_a_mark_that_was_not_written_to_its_end_is_written_again(tmp_path: Path) -> None:
    (tmp_path / MARKER).touch()
    folder = OutputFolder(tmp_path, "batch-1")
    folder.claim("input")
    folder.release()
    with pytest.raises(WeirError, match="belongs to job batch-1"):
        OutputFolder(tmp_path, "batch-2").check()


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeirError, match="is not empty: files are not overwritten"):
        OutputFolder(tmp_path, "batch-1").claim("input")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "pattern",
    [
        "*",
        "*.csv",
        "**/*.csv",
        "**",
        "a/**",
        "a/**/*",
        "?/[bc]/x.csv",
        "*/b/x.csv",
        "**/x.csv",
        "a/**/c/x.*",
        ".*",
        "no*",
    ],
)
def test_a_pattern_matches_what_a_shell_finds(tmp_path: Path, pattern: str) -> None:
    for place in ("a/b/x.csv", "a/b/c/x.csv", "a/x.csv", "b/c/x.csv", "x.csv", "y.txt", ".hidden/x.csv", "a/.x.csv"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
    spec = JobSpec(model="m", inputs=(f"{tmp_path}/{pattern}",), output=str(tmp_path / "out"))
    wanted = sorted({str(Path(found)) for found in glob.glob(f"{tmp_path}/{pattern}", recursive=True)})
    if wanted:
        assert list(BatchRoots([str(tmp_path)]).checked(spec).inputs) == wanted
    else:
        with pytest.raises(WeirError, match="no input matches"):
            BatchRoots([str(tmp_path)]).checked(spec)


def test_a_pattern_follows_no_links_to_any_depth(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.csv").touch()
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    spec = JobSpec(model="m", inputs=(f"{tmp_path}/**/x.csv",), output=str(tmp_path / "out"))
    assert list(BatchRoots([str(tmp_path)]).checked(spec).inputs) == [f"{tmp_path}/a/x.csv"]


@pytest.mark.parametrize("pattern", ["**/x", "*/*", "*"])
def test_a_pattern_that_takes_too_long_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    for number in range(30):
        (tmp_path / str(number) / "deep").mkdir(parents=True)
    monkeypatch.setattr(folders, "MAX_EXAMINED", 20)
    spec = JobSpec(model="m", inputs=(f"{tmp_path}/{pattern}",), output=str(tmp_path / "out"))
    with pytest.raises(WeirError, match="takes too long to expand: 21 files and folders were examined, of at most 20"):
        BatchRoots([str(tmp_path)]).checked(spec)


def test_a_pattern_has_one_part_of_any_depth_at_most(tmp_path: Path) -> None:
    spec = JobSpec(model="m", inputs=(f"{tmp_path}/**/**/x",), output=str(tmp_path / "out"))
    with pytest.raises(WeirError, match=r"must not contain '\*\*' more than once"):
        BatchRoots([str(tmp_path)]).checked(spec)


def test_patterns_are_expanded_once(tmp_path: Path) -> None:
    roots = BatchRoots([str(tmp_path)])
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).touch()
    spec = JobSpec(model="m", inputs=(f"{tmp_path}/*.jsonl",), output=str(tmp_path / "out"))
    assert roots.checked(spec).inputs == (f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl")
    assert roots.holds(spec)
    assert not BatchRoots([]).holds(spec)
    assert not BatchRoots([str(tmp_path / "other")]).holds(spec)

    for pattern in ("/*", f"{tmp_path}/../*", f"{tmp_path}/*/../../*"):
        with pytest.raises(WeirError) as refused:
            roots.checked(JobSpec(model="m", inputs=(pattern,), output=str(tmp_path / "out")))
        assert refused.value.code is ErrorCode.INVALID_ARG


def test_without_a_root_there_are_no_jobs() -> None:
    with pytest.raises(WeirError, match="offline jobs are disabled on this server: start it with --batch-root FOLDER"):
        BatchRoots([]).check_any()


def test_links_don_t_lead_out(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "secret.jsonl").touch()
    (tmp_path / "root" / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (tmp_path / "root" / "circle").symlink_to(tmp_path / "root" / "circle")
    roots = BatchRoots([str(tmp_path / "root")])
    for name in ("link.jsonl", "circle", "../secret.jsonl", "with\0zero"):
        with pytest.raises(WeirError) as refused:
            roots.inputs([f"{tmp_path}/root/{name}"])
        assert refused.value.code is ErrorCode.INVALID_ARG


def test_uploads_go_with_their_jobs(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    uploads.sweep(())
    source, output = uploads.store("batch-1", b"{}\n")
    assert Path(source).read_bytes() == b"{}\n"
    assert Path(output).parent == Path(source).parent
    uploads.sweep(())  # it is too young
    assert Path(source).exists()
    uploads.remove("batch-1")
    uploads.remove("batch-1")
    assert not Path(source).parent.exists()

"""What is kept of jobs: it is checked when it comes from outside, and when it is read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from weir.jobs.records.record import MAX_INPUTS, DesiredState, Job, JobEntry, JobProgress, JobSpec, JobState, new_job_id
from weir.schemas.core.errors import ErrorCode, WeirError

SPEC = JobSpec(model="m", inputs=("/a",), output="/b")
ENTRY = JobEntry(id=new_job_id(), spec=SPEC, created_ms=1)
VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=2)
JSON = VALUES | st.dictionaries(st.sampled_from([*SPEC.document()]) | st.text(max_size=5), VALUES, max_size=2)


def test_entries_and_progress_come_back_as_they_were() -> None:
    assert JobEntry.unpack(ENTRY.pack()) == ENTRY
    progress = JobProgress(state=JobState.RUNNING, total=10, done=3, rate=1.5, note="ö")
    assert JobProgress.unpack(progress.pack()) == progress


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ([], "a job is described by a JSON object"),
        ({}, "a job needs field 'model'"),
        ({"model": "m"}, "a job needs field 'input'"),
        ({"model": "m", "input": "/a"}, "a job needs field 'output'"),
        ({"model": "m", "input": [], "output": "/b"}, "a job needs field 'input'"),
        ({"model": "m", "input": [1], "output": "/b"}, "field 'input' of a job must be a path or a list of paths"),
        ({"model": "m", "input": ["/a"] * (MAX_INPUTS + 1), "output": "/b"}, "a job takes at most 10000 input paths"),
        ({"model": "m", "input": ["/a\0"], "output": "/b"}, "a path in field 'input' of a job is not valid text"),
        ({"model": "\ud800", "input": ["/a"], "output": "/b"}, "field 'model' of a job is not valid text"),
        ({"model": 1}, "field 'model' of a job must be a string"),
        (
            {"model": "m", "input": "/a", "output": "/b", "priority": True},
            "field 'priority' of a job must be an integer",
        ),
        ({"model": "m", "input": "/a", "output": "/b", "priority": -1}, "a number of the job is out of range"),
        ({"model": "m", "input": "/a", "output": "/b", "version": "one"}, "field 'version' of a job must be a number"),
    ],
)
def test_what_is_no_job_is_refused(document: Any, why: str) -> None:
    with pytest.raises(WeirError) as refused:
        JobSpec.of(document)
    assert refused.value.code is ErrorCode.INVALID_ARG
    assert refused.value.message.startswith(why)


@settings(max_examples=25, deadline=None)
@given(JSON)
def test_no_document_is_more_than_refused(document: Any) -> None:
    with pytest.raises(WeirError):
        JobSpec.of(document)


@given(st.binary() | st.sampled_from([b"[]", b"{}", b'{"id":1,"spec":{},"wanted":"run"}', ENTRY.pack()[:-2]]))
def test_what_lies_in_the_bucket_is_checked(data: bytes) -> None:
    for unpack in (JobEntry.unpack, JobProgress.unpack):
        if not (unpack == JobProgress.unpack and data == b"{}"):
            with pytest.raises(ValueError, match=r".*"):
                unpack(data)


@pytest.mark.parametrize(
    ("state", "wanted", "round", "shown", "needs_runner"),
    [
        (JobState.QUEUED, DesiredState.RUN, 0, JobState.QUEUED, True),
        (JobState.QUEUED, DesiredState.PAUSE, 0, JobState.QUEUED, True),
        (JobState.RUNNING, DesiredState.RUN, 0, JobState.RUNNING, True),
        (JobState.RUNNING, DesiredState.PAUSE, 0, JobState.RUNNING, True),
        (JobState.PAUSED, DesiredState.PAUSE, 0, JobState.PAUSED, False),
        (JobState.PAUSED, DesiredState.RUN, 0, JobState.QUEUED, True),
        (JobState.PAUSED, DesiredState.CANCEL, 0, JobState.CANCELLING, True),
        (JobState.CANCELLED, DesiredState.CANCEL, 0, JobState.CANCELLED, False),
        (JobState.SUCCEEDED, DesiredState.RUN, 0, JobState.SUCCEEDED, False),
        (JobState.SUCCEEDED, DesiredState.RUN, 1, JobState.QUEUED, True),
        (JobState.FAILED, DesiredState.CANCEL, 0, JobState.FAILED, False),
    ],
)
def test_a_job_is_where_both_its_keys_say(
    state: JobState, wanted: DesiredState, round: int, shown: JobState, needs_runner: bool
) -> None:
    job = Job(replace(ENTRY, wanted=wanted, round=round), JobProgress(state=state))
    assert (job.state, job.needs_runner) == (shown, needs_runner)
    assert job.to_dict()["state"] == shown.value

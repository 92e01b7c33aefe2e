"""The subjects of durable requests."""

from hypothesis import given
from hypothesis import strategies as st

from weir.bus.naming import durable_subjects as subjects

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(NAMES, NAMES, st.sampled_from(["", "1", "42"]))
def test_model_and_version_follow_from_a_subject(model: str, id: str, version: str) -> None:
    subject = subjects.job_event(model, id, version)
    assert subjects.durable_target(subject) == ("event", model, version)
    patterns = [subjects.any_job_event(id), subjects.any_job_event(id, model)]
    for plain, versioned in patterns:
        pattern = versioned if version else plain
        tokens = zip(pattern.split("."), subject.split("."), strict=True)
        assert all(wanted in ("*", token) for wanted, token in tokens)

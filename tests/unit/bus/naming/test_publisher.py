"""The user of the broker in a subject."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.bus.naming.subjects import infer, infer_flow_by, publisher, token

NAMES = st.text(min_size=1, max_size=20)


@given(NAMES, NAMES)
def test_a_subject_names_its_publisher(user: str, model: str) -> None:
    plain = infer(model, "1")
    assert publisher(f"by.{token(user)}.{plain}") == (user, plain)
    assert publisher(plain) == ("", plain)
    assert publisher(infer_flow_by("gateway", user)) == (user, "flow.gateway")


@given(st.lists(st.text("by.=*>A", max_size=5), max_size=5))
def test_any_subject_has_one_or_none(tokens: list[str]) -> None:
    subject = ".".join(tokens)
    user, rest = publisher(subject)
    assert subject.split(".")[0] == "by" or (user, rest) == ("", subject)


@pytest.mark.parametrize("subject", ["by", "by.alice", "by..infer.m", "bye.alice.infer.m", "BY.alice.infer.m"])
def test_subjects_that_ask_nothing_for_a_user(subject: str) -> None:
    user, rest = publisher(subject)
    assert user == "" or not rest

"""Correlation ids: equal ones of two owners are two sequences, and errors show them as their callers know them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weir.schemas.core.requests import owned_id, shown_id

OWNERS = st.text(st.characters(exclude_categories=["C"]), min_size=1)
IDS = st.integers() | st.text()


@given(OWNERS, IDS)
def test_an_id_of_an_owner_is_shown_without_it(owner: str, id: int | str) -> None:
    assert str(shown_id(owned_id(owner, id))) == str(id)


@given(st.tuples(OWNERS, IDS), st.tuples(OWNERS, IDS))
def test_ids_of_two_owners_differ(one: tuple[str, int | str], other: tuple[str, int | str]) -> None:
    assert (owned_id(*one) == owned_id(*other)) == (repr(one) == repr(other))


def test_without_an_owner_an_id_is_itself() -> None:
    assert (owned_id("", 7), shown_id(7), shown_id("7")) == (7, 7, "7")

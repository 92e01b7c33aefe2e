import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.durable.api.options import Preferences, prefers_async, read_preferences


@pytest.mark.parametrize(
    "values, expected",
    [
        ([b"respond-async"], Preferences(True)),
        ([b"Respond-ASYNC"], Preferences(True)),
        ([b"respond-async; foo=bar"], Preferences(True)),
        ([b"return=minimal, respond-async , wait=10"], Preferences(True, 10.0)),
        ([b"return=minimal", b"respond-async"], Preferences(True)),
        ([b"wait=10", b"wait=20"], Preferences(False, 10.0)),
        ([b'wait="5"'], Preferences(False, 5.0)),
        ([b"wait = 100000"], Preferences(False, 60.0)),
        ([b"wait=-1"], Preferences()),
        ([b"wait=1e3"], Preferences()),
        ([b"wait"], Preferences()),
        ([b"respond-asynchronously"], Preferences()),
        ([b'foo="respond-async"'], Preferences()),
        ([b'foo="a, respond-async"'], Preferences()),
        ([b'foo="a, respond-async'], Preferences(True)),  # the quotation has no end
        ([b""], Preferences()),
        ([b"x" * 2000 + b", respond-async"], Preferences()),
        ([], Preferences()),
    ],
)
def test_what_a_header_asks_for(values: list[bytes], expected: Preferences) -> None:
    assert read_preferences(values) == expected


def test_only_the_header_of_that_name_counts() -> None:
    assert prefers_async([(b"accept", b"*/*"), (b"prefer", b"respond-async")])
    assert not prefers_async([(b"preferred", b"respond-async")])


@given(st.lists(st.binary(max_size=60), max_size=3))
def test_any_bytes_are_read(values: list[bytes]) -> None:
    preferences = read_preferences(values)
    assert preferences.wait_s is None or 0 <= preferences.wait_s <= 60


@pytest.mark.parametrize("value", [b'"' * 1024, b'"\\' * 512, b'a"' * 512, b"," * 1024])
def test_no_header_is_read_by_trying_all_of_its_parts(value: bytes) -> None:
    """An expression that tries each way to divide it would not end."""
    assert read_preferences([value]) == Preferences()

from __future__ import annotations

import time

import pytest

from weir.calls.request_headers import deadline_ms_in, read_deadline_ms
from weir.schemas.core.errors import WeirError


def test_a_deadline_is_unix_time_in_milliseconds():
    assert read_deadline_ms(b"1700000000123") == 1_700_000_000_123
    assert read_deadline_ms(b" 5 ") == 5


@pytest.mark.parametrize("value", [b"", b"0", b"-1", b"1.5", b"1e9", b"soon", b"\xb2", b"1 2", b"9" * 16, b"x" * 9_000])
def test_an_invalid_queue_wait(value: bytes):
    with pytest.raises(WeirError, match="Unable to parse Weir-Deadline-Ms") as refused:
        read_deadline_ms(value)
    assert refused.value.http_status == 400
    assert len(refused.value.message) < 200


def test_the_time_that_is_left_counts_from_now():
    before_ms, deadline_ms, after_ms = time.time() * 1000, deadline_ms_in(60), time.time() * 1000
    assert before_ms - 1 <= deadline_ms - 60_000 <= after_ms + 1

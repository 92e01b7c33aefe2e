"""W3C's headers, read and written."""

import json

import pytest

from weir.telemetry.tracing.context import TraceContext, exported_context, format_traceparent, parse_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    "text", [f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00", f"01-{TRACE}-{SPAN}-01-more", f" 00-{TRACE}-{SPAN}-01 "]
)
def test_a_traceparent_names_a_place(text: str) -> None:
    assert parse_traceparent(text) == TraceContext(int(TRACE, 16), int(SPAN, 16))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01\n00",
    ],
)
def test_a_malformed_traceparent_is_ignored(text: str) -> None:
    assert parse_traceparent(text) is None


def test_a_traceparent_is_formatted_as_it_is_parsed() -> None:
    assert format_traceparent(int(TRACE, 16), int(SPAN, 16), True) == f"00-{TRACE}-{SPAN}-01"
    assert format_traceparent(1, 2, False) == f"00-{'1':0>32}-{'2':0>16}-00"


def test_models_see_exported_traces_only() -> None:
    parent = f"00-{TRACE}-{SPAN}-01"
    assert exported_context(parent, "") == f'{{"traceparent":"{parent}"}}'
    assert json.loads(exported_context(parent, 'a="b"')) == {"traceparent": parent, "tracestate": 'a="b"'}
    assert exported_context(f"00-{TRACE}-{SPAN}-00", "a=b") == ""
    assert exported_context("", "") == ""

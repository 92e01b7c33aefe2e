"""Trace settings: the command line, changes by clients, and which requests are sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.schemas.core.errors import ErrorCode, WeirError
from weir.telemetry.tracing.settings import (
    Changes,
    TraceConfig,
    TraceSampler,
    TraceSetting,
    TraceSettings,
    changes_of_json,
    changes_of_lists,
    merged,
    pack_overrides,
    unpack_overrides,
)

INVALID, INTERNAL, UNSUPPORTED = ErrorCode.INVALID_ARG, ErrorCode.INTERNAL, ErrorCode.UNSUPPORTED
NO_STRING = "attempt to access JSON non-string as string"
FILE = "trace file location can not be updated through network protocol"
ONLY_OFF = "Expect only one trace level 'OFF' is specified"
HUGE = "9" * 23


def outcome_of(read: Callable[[Any], Changes], asked: Any) -> Any:
    try:
        return read(asked)
    except WeirError as error:
        return error.code, error.message


@pytest.mark.parametrize(
    ("body", "changes"),
    [
        ({}, {}),
        ([], {}),
        (3, {}),
        ({"unknown": 1, "trace_mode": "opentelemetry"}, {}),
        ({"trace_level": []}, {}),
        ({"trace_level": ["FOO", "MAX"]}, {}),
        ({"trace_level": ["OFF"]}, {"trace_level": []}),
        ({"trace_level": ["TENSORS", "FOO", "TIMESTAMPS"]}, {"trace_level": ["TIMESTAMPS", "TENSORS"]}),
        ({"trace_level": None, "trace_rate": None}, {"trace_level": None, "trace_rate": None}),
        ({"trace_rate": "0"}, {"trace_rate": 0}),
        ({"trace_rate": " +7"}, {"trace_rate": 7}),
        ({"trace_rate": "1.5"}, {"trace_rate": 1}),
        ({"trace_rate": "12abc"}, {"trace_rate": 12}),
        ({"trace_rate": "-1"}, {"trace_rate": 4294967295}),
        ({"trace_count": "-1", "log_frequency": "-2"}, {"trace_count": -1, "log_frequency": 4294967294}),
        ({"trace_count": "2147483647"}, {"trace_count": 2147483647}),
    ],
)
def test_changes_are_read_from_a_json_body(body: Any, changes: Changes) -> None:
    assert changes_of_json(body) == changes


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ({"trace_file": "x", "trace_rate": "zz"}, UNSUPPORTED, FILE),
        ({"trace_file": None}, UNSUPPORTED, FILE),
        ({"trace_level": ["TIMESTAMPS", "OFF"]}, INVALID, ONLY_OFF),
        ({"trace_level": ["OFF", "OFF"]}, INVALID, ONLY_OFF),
        ({"trace_level": "TIMESTAMPS"}, INTERNAL, "attempt to access JSON non-array as array"),
        ({"trace_level": [None]}, INTERNAL, NO_STRING),
        ({"trace_rate": 1}, INTERNAL, NO_STRING),
        ({"trace_count": ["3"]}, INTERNAL, NO_STRING),
        ({"log_frequency": True}, INTERNAL, NO_STRING),
        ({"trace_rate": "abc"}, INVALID, "Unable to parse 'trace_rate', got: abc"),
        ({"trace_rate": ""}, INVALID, "Unable to parse 'trace_rate', got: "),
        ({"trace_count": "x"}, INVALID, "Unable to parse 'trace_count', got: x"),
        ({"log_frequency": "x"}, INVALID, "Unable to parse 'log_frequency', got: x"),
        ({"trace_count": "-2"}, INVALID, "Unable to parse 'trace_count'. Expecting value >= -1, got:-2"),
        (
            {"trace_rate": "4294967295"},
            INVALID,
            "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: 4294967295",
        ),
        (
            {"trace_count": "2147483648"},
            INVALID,
            "Unable to parse 'trace_count', value is out of range [ -1, 2147483647 ], got: 2147483648",
        ),
        (
            {"log_frequency": HUGE},
            INVALID,
            f"Unable to parse 'log_frequency', value is out of range [ 0, 4294967295 ], got: {HUGE}",
        ),
    ],
)
def test_an_invalid_json_body_is_rejected(body: Any, code: ErrorCode, message: str) -> None:
    with pytest.raises(WeirError) as caught:
        changes_of_json(body)
    assert (caught.value.code, caught.value.message) == (code, message)


@pytest.mark.parametrize(
    ("settings", "outcome"),
    [
        ({}, {}),
        ({"unknown": ["1"]}, {}),
        ({"trace_level": [], "trace_rate": []}, {"trace_level": None, "trace_rate": None}),
        ({"trace_level": ["TIMESTAMPS", "FOO"]}, {"trace_level": ["TIMESTAMPS"]}),
        ({"trace_count": ["6"]}, {"trace_count": 6}),
        ({"trace_file": []}, (UNSUPPORTED, FILE)),
        ({"trace_level": ["FOO", "OFF"]}, (INVALID, ONLY_OFF)),
        ({"trace_rate": ["1", "2"]}, (INVALID, "expect only 1 value for 'trace_rate'")),
        ({"log_frequency": ["x"]}, (INVALID, "Unable to parse 'log_frequency', got: x")),
        ({"trace_count": ["-2"]}, (INVALID, "Unable to parse 'trace_count'. Expecting value >= -1, got: -2")),
    ],
)
def test_changes_are_read_from_grpc_lists(settings: dict[str, list[str]], outcome: Any) -> None:
    assert outcome_of(changes_of_lists, settings) == outcome


def make(*values: str) -> TraceSettings:
    return TraceSettings(TraceConfig.parse(values))


def change(settings: TraceSettings, model: str, **changes: Any) -> None:
    settings.replace(model, merged(settings._overrides.get(model, {}), changes))


def test_a_model_uses_the_global_setting_for_missing_values() -> None:
    settings = make("level=TIMESTAMPS", "rate=50")
    change(settings, "m", trace_rate=3)
    change(settings, "", trace_rate=78, trace_count=9)
    assert settings.setting("m") == TraceSetting(("TIMESTAMPS",), 3, 9, 0)
    assert settings.setting("other") == settings.setting() == TraceSetting(("TIMESTAMPS",), 78, 9, 0)
    change(settings, "m", trace_rate=None)
    assert settings.setting("m") == settings.setting()
    assert settings.models() == []
    change(settings, "", trace_rate=None, trace_count=None)
    assert settings.setting() == TraceSetting(("TIMESTAMPS",), 50, -1, 0)


def test_off_is_a_level_that_a_model_can_be_given() -> None:
    settings = make("level=TIMESTAMPS")
    change(settings, "m", trace_level=[])
    assert settings.to_dict("m", -1)["trace_level"] == ["OFF"]
    assert settings.to_dict("", -1)["trace_level"] == ["TIMESTAMPS"]


def test_a_setting_is_reported_in_tritons_form_and_order() -> None:
    reported = make("triton,file=traces", "triton,log-frequency=4", "count=10").to_dict("", 7)
    assert list(reported.items()) == [
        ("trace_level", ["OFF"]),
        ("trace_rate", "1000"),
        ("trace_count", "7"),
        ("log_frequency", "4"),
        ("trace_file", "traces"),
        ("trace_mode", "triton"),
    ]
    options = (
        "opentelemetry,url=http://x/v1/traces",
        "opentelemetry,resource=a=b",
        "opentelemetry,bsp_schedule_delay=9",
    )
    assert make("mode=opentelemetry", *options).to_dict("", -1) == {
        "trace_level": ["OFF"],
        "trace_rate": "1000",
        "trace_count": "-1",
        "trace_mode": "opentelemetry",
        "url": "http://x/v1/traces",
        "resource": "a=b",
        "bsp_max_queue_size": "2048",
        "bsp_schedule_delay": "9",
        "bsp_max_export_batch_size": "512",
    }


def test_a_password_in_the_url_of_the_collector_is_not_reported() -> None:
    url = "http://u:hu,sh@x/v1/traces"
    settings = make("mode=opentelemetry", f"opentelemetry,url={url}")
    assert settings.config.url == url
    assert settings.to_dict("", -1)["url"] == "http://x/v1/traces"
    for wrong in (f"triton,url={url}", f"jaeger,url={url}"):
        with pytest.raises(ValueError, match="url=http://x/v1/traces"):
            TraceConfig.parse([wrong])


def test_the_command_line_gives_levels_resources_and_batches() -> None:
    config = TraceConfig.parse(
        [
            "level=TENSORS",
            "level=TIMESTAMPS",
            "opentelemetry,resource=service.name=mine",
            "opentelemetry,resource=zone=a=b",
            "opentelemetry,bsp_max_queue_size=10",
            "opentelemetry,bsp_max_export_batch_size=5",
        ]
    )
    assert config.initial.levels == ("TIMESTAMPS", "TENSORS")
    assert config.resource == {"service.name": "mine", "zone": "a=b"}
    assert config.batches == {"bsp_max_queue_size": 10, "bsp_schedule_delay": 5000, "bsp_max_export_batch_size": 5}
    assert config.url == "http://localhost:4318/v1/traces"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("rate", "option format is '<mode>,<setting>=<value>' or '<setting>=<value>'. Got rate"),
        ("jaeger,url=x", "option format is .* Got jaeger,url=x"),
        ("mode=jaeger", "--trace-config: unknown setting or value 'mode=jaeger'"),
        ("level=ALL", "--trace-config: unknown setting or value 'level=ALL'"),
        ("triton,url=x", "--trace-config: unknown setting or value 'triton,url=x'"),
        ("rate=x", "Unable to parse 'trace_rate', got: x"),
        ("opentelemetry,resource=x", "resource must be <key>=<value>, not 'x'"),
        ("opentelemetry,bsp_schedule_delay=0", "bsp_schedule_delay must be a positive number, not '0'"),
        ("opentelemetry,bsp_max_queue_size=5", "bsp_max_export_batch_size must not exceed bsp_max_queue_size"),
    ],
)
def test_an_invalid_command_line_is_rejected(value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TraceConfig.parse([value])


def test_off_excludes_other_levels_on_the_command_line() -> None:
    with pytest.raises(ValueError, match="excludes"):
        TraceConfig.parse(["level=OFF", "level=TIMESTAMPS"])


def test_overrides_travel_as_they_are() -> None:
    overrides = {"trace_level": ["TIMESTAMPS"], "trace_rate": 1, "trace_count": -1, "log_frequency": 2**32 - 1}
    assert unpack_overrides(pack_overrides(overrides)) == overrides


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"trace_file": "x"}',
        b'{"trace_level": "TIMESTAMPS"}',
        b'{"trace_level": ["OFF"]}',
        b'{"trace_rate": "1"}',
        b'{"trace_rate": true}',
        b'{"trace_rate": -1}',
        b'{"trace_count": -2}',
        b'{"log_frequency": 4294967296}',
        b'{"trace_rate": null}',
    ],
)
def test_malformed_overrides_are_rejected(data: bytes) -> None:
    with pytest.raises(ValueError):
        unpack_overrides(data)


def test_every_nth_request_is_sampled() -> None:
    sampler = TraceSampler(3, -1)
    assert [sampler.sample() for _ in range(7)] == [False, False, True, False, False, True, False]
    assert sampler.remaining == -1


def test_rate_0_samples_only_propagated_requests() -> None:
    sampler = TraceSampler(0, 5)
    assert [sampler.sample(propagated) for propagated in (False, True, False, True)] == [False, True, False, True]
    assert sampler.remaining == 5


def test_as_triton_counted_ten_requests_of_which_five_were_propagated() -> None:
    sampler = TraceSampler(2, 7)
    assert sum(sampler.sample() for _ in range(5)) == 2
    assert sum(sampler.sample(True) for _ in range(5)) == 5
    assert sampler.remaining == 2


@given(st.integers(1, 9), st.integers(0, 20), st.lists(st.booleans(), max_size=200))
def test_the_count_bounds_what_is_taken_and_callers_always_are(rate: int, count: int, callers: list[bool]) -> None:
    sampler = TraceSampler(rate, count)
    taken = [sampler.sample(propagated) for propagated in callers]
    own = sum(was and not propagated for was, propagated in zip(taken, callers, strict=True))
    assert own <= count - sampler.remaining <= count
    assert all(was for was, propagated in zip(taken, callers, strict=True) if propagated)
    if not any(callers):
        assert own == min(count, len(callers) // rate)

"""The rules of log settings, with every text; expected are the responses of Triton 2.51."""

from collections.abc import Callable
from typing import Any

import pytest

from weir.schemas.core.errors import ErrorCode, WeirError
from weir.telemetry.log_settings import (
    Changes,
    LogSettings,
    changes_of_json,
    changes_of_values,
    pack_changes,
    unpack_changes,
)

INVALID, INTERNAL, UNSUPPORTED = ErrorCode.INVALID_ARG, ErrorCode.INTERNAL, ErrorCode.UNSUPPORTED
FILE = (UNSUPPORTED, "log file location can not be updated through network protocol")
NO_BOOLEAN = (INTERNAL, "attempt to access JSON non-boolean as boolean")
NO_UNSIGNED = (INTERNAL, "attempt to access JSON non-unsigned-integer as unsigned-integer")
STRING, BOOLEAN, UNSIGNED = "string_param", "bool_param", "uint32_param"


def outcome_of(read: Callable[[Any], Changes], asked: Any) -> Any:
    try:
        return read(asked)
    except WeirError as error:
        return error.code, error.message


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ({}, {}),
        ([], {}),
        (3, {}),
        ({"unknown": 1, "log_info": None, "log_file": None}, {}),
        ({"log_info": False, "log_error": True}, {"log_info": False, "log_error": True}),
        ({"log_verbose_level": 3, "log_format": "ISO8601"}, {"log_verbose_level": 3, "log_format": "ISO8601"}),
        ({"log_verbose_level": 4294967295}, {"log_verbose_level": 0}),
        ({"log_verbose_level": 4294967297}, {"log_verbose_level": 1}),
        ({"log_file": "x"}, FILE),
        ({"log_file": ""}, FILE),
        ({"log_file": 1}, FILE),
        ({"log_info": "false"}, NO_BOOLEAN),
        ({"log_warning": 1}, NO_BOOLEAN),
        ({"log_error": []}, NO_BOOLEAN),
        ({"log_verbose_level": "1"}, NO_UNSIGNED),
        ({"log_verbose_level": -1}, NO_UNSIGNED),
        ({"log_verbose_level": 1.5}, NO_UNSIGNED),
        ({"log_verbose_level": True}, NO_UNSIGNED),
        ({"log_format": 1}, (INTERNAL, "attempt to access JSON non-string as string")),
        ({"log_format": "json"}, (ErrorCode.UNAVAILABLE, "invalid argument for --log_format, got: json")),
        ({"log_format": ""}, (ErrorCode.UNAVAILABLE, "invalid argument for --log_format, got: ")),
    ],
)
def test_changes_are_read_from_a_json_body(body: Any, outcome: Any) -> None:
    assert outcome_of(changes_of_json, body) == outcome


@pytest.mark.parametrize(
    ("settings", "outcome"),
    [
        ({}, {}),
        ({"unknown": (STRING, "1")}, {}),
        ({"log_info": (BOOLEAN, False)}, {"log_info": False}),
        ({"log_verbose_level": (UNSIGNED, 2)}, {"log_verbose_level": 2}),
        ({"log_format": (STRING, "ISO8601")}, {"log_format": "ISO8601"}),
        ({"log_file": (None, None)}, FILE),
        ({"log_warning": (None, None)}, (INVALID, "expect boolean for 'log_warning'")),
        ({"log_error": (STRING, "x")}, (INVALID, "expect boolean for 'log_error'")),
        ({"log_verbose_level": (STRING, "1")}, (INVALID, "expect int32 for 'log_verbose_level'")),
        ({"log_format": (UNSIGNED, 1)}, (INVALID, "expect string for 'log_format'")),
        ({"log_format": (STRING, "bad")}, (INVALID, "invalid argument for log_format, got: bad")),
    ],
)
def test_changes_are_read_from_grpc_values(settings: dict[str, tuple[str | None, Any]], outcome: Any) -> None:
    assert outcome_of(changes_of_values, settings) == outcome


def test_settings_are_reported_in_tritons_order() -> None:
    reported = LogSettings().changed({"log_info": False}).to_dict()
    assert list(reported.items()) == [
        ("log_file", ""),
        ("log_info", False),
        ("log_warning", True),
        ("log_error", True),
        ("log_verbose_level", 0),
        ("log_format", "default"),
    ]


def test_changes_travel_as_they_are() -> None:
    changes = {"log_error": False, "log_verbose_level": 2, "log_format": "ISO8601"}
    assert unpack_changes(pack_changes(changes)) == changes


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"log_file": "x"}',
        b'{"log_info": 1}',
        b'{"log_verbose_level": -1}',
        b'{"log_verbose_level": true}',
        b'{"log_format": "xml"}',
        b'{"log_format": ["json"]}',
    ],
)
def test_malformed_changes_are_rejected(data: bytes) -> None:
    with pytest.raises(ValueError):
        unpack_changes(data)

import pytest

from weir.gateway.grpc.codec import read_version
from weir.schemas.core.errors import ErrorCode, WeirError


@pytest.mark.parametrize(
    "text,expected",
    [
        ("", ""),
        ("1", "1"),
        (" 1", "1"),
        ("1 ", "1"),
        ("01", "1"),
        ("+1", "1"),
        ("1x", "1"),
        ("1.0", "1"),
        ("0", "0"),
        ("-0", "0"),
        ("9223372036854775807", "9223372036854775807"),
        ("0" * 5000 + "7", "7"),
    ],
)
def test_versions_are_read_as_c_reads_numbers(text: str, expected: str) -> None:
    assert read_version(text) == expected


@pytest.mark.parametrize(
    "text",
    ["x", " ", "-", "+-1", "9223372036854775808", "99999999999999999999", "-9223372036854775809", "9" * 9000, "\u0661"],
)
def test_text_that_is_not_a_number_is_rejected_with_tritons_text(text: str) -> None:
    with pytest.raises(WeirError) as caught:
        read_version(text)
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.message == (
        f"failed to get model version from specified version string '{text}' (details: stol), version should be an "
        "integral value > 0"
    )


@pytest.mark.parametrize("text", ["-1", "-2", " -7x"])
def test_negative_versions_are_rejected_with_tritons_text(text: str) -> None:
    with pytest.raises(WeirError) as caught:
        read_version(text)
    assert caught.value.message == (
        f"invalid model version specified '{text}' , version should be an integral value > 0"
    )

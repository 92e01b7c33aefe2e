"""What `HOST[:PORT]` says, and what says nothing."""

from __future__ import annotations

import pytest

from weir.schemas.core.names import ListenAddress


@pytest.mark.parametrize(
    ("text", "host", "port", "is_any"),
    [
        ("10.0.0.7", "10.0.0.7", 0, False),
        ("one:7000", "one", 7000, False),
        ("0.0.0.0:7000", "0.0.0.0", 7000, True),
        ("::", "::", 0, True),
        ("[fd00::1]:7000", "fd00::1", 7000, False),
    ],
)
def test_listen_addresses(text: str, host: str, port: int, is_any: bool) -> None:
    where = ListenAddress.of(text)
    assert (*where, where.is_any) == (host, port, is_any)


@pytest.mark.parametrize("text", ["", ":7000", "one:", "one:x", "one:65536", "[fd00::1", "[fd00::1]7000"])
def test_invalid_listen_addresses(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not HOST\[:PORT\]"):
        ListenAddress.of(text)

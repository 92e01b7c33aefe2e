"""What `HOST[:PORT]` says, and what says nothing; names in paths."""

from __future__ import annotations

from urllib.parse import unquote

import pytest

from weir.schemas.core.names import ListenAddress, model_path, routed_path


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


@pytest.mark.parametrize("name", ["net", "a/b::net", "50%", "a%2Fb", "%25/é ?#"])
def test_a_name_stays_one_segment_of_its_path(name: str) -> None:
    parts = routed_path(f"{model_path(name)}/history").split("/")
    assert [unquote(part) for part in parts] == ["", "v2", "models", name, "history"]
    assert model_path(name, "2") == f"{model_path(name)}/versions/2"


def test_other_paths_are_decoded() -> None:
    assert routed_path("/v2/m%6fdels/a%20b") == "/v2/models/a b"

"""Headers of NATS messages."""

from hypothesis import given
from hypothesis import strategies as st

from weir.bus.nats.headers import last_header, pack_headers, parse_headers

NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9-]{0,20}", fullmatch=True)
VALUES = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=40).map(str.strip)


@given(st.dictionaries(NAMES, VALUES, max_size=5))
def test_what_is_packed_is_read(headers: dict[str, str]) -> None:
    read = parse_headers(pack_headers(headers))
    first: dict[str, str] = {}
    for name, value in headers.items():
        first.setdefault(name.lower(), value)
    assert read == first


def test_a_value_can_not_end_its_line() -> None:
    assert parse_headers(pack_headers({"A": "x\r\nB: y"})) == {"a": "x B: y"}


@given(st.binary(max_size=60))
def test_nothing_breaks_the_reader(block: bytes) -> None:
    parse_headers(b"NATS/1.0\r\n" + block)


def test_what_is_no_character_is_packed_all_the_same() -> None:
    assert parse_headers(pack_headers({"A": "x\ud800y"})) == {"a": "x?y"}


def test_the_last_one_of_a_name_is_the_servers() -> None:
    block = b"NATS/1.0\r\nNats-Subject: made up\r\nA: b\r\nNats-Subject: event.m\r\n\r\n"
    assert last_header(block, b"Nats-Subject") == "event.m"
    assert last_header(block, b"Nats-Sequence") == ""

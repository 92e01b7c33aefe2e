"""Who gives room to a new connection, who never does, and what is counted and logged."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.http_server import connection_cap
from weir.http_server.connection_cap import (
    DISPLACED,
    EXAMINED,
    IDLE_S,
    MAX_CONNECTIONS,
    REJECTED,
    SILENT,
    ConnectionCap,
    principal_of,
)
from weir.runtime.log_limiter import LogLimiter


class Peer:
    """A connection that has been idle for `idle`, and had a request unless it is `fresh`."""

    def __init__(self, cap: ConnectionCap, idle: float = 0.0, fresh: bool = False) -> None:
        self.idle = idle
        self.has_served = not fresh
        self.is_ended = False
        self._cap = cap

    def idle_s(self) -> float:
        return self.idle

    def make_room(self) -> None:
        self.is_ended = True
        self._cap.remove(self)  # as when the transport reports its end


@pytest.fixture(autouse=True)
def _own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_cap, "_limited", LogLimiter(connection_cap.logger))


def full(cap: ConnectionCap, *peers: Peer) -> list[Peer]:
    for peer in peers:
        assert cap.admit(peer, "a")
    return list(peers)


def test_one_address_leaves_a_quarter_to_others() -> None:
    cap = ConnectionCap(8)
    full(cap, *(Peer(cap) for _ in range(6)))
    assert not cap.admit(Peer(cap), "a")
    assert cap.admit(Peer(cap), "b")
    assert cap.admit(Peer(cap), "c")
    assert not cap.admit(Peer(cap), "d")
    assert (cap.open, cap.ended[REJECTED]) == (8, 2)


def test_a_silent_connection_gives_room_first_and_then_the_one_that_is_idle_longest() -> None:
    cap = ConnectionCap(8)
    busy, recent, idle, longest, silent, older = full(
        cap, Peer(cap), Peer(cap, IDLE_S / 2), Peer(cap, 30), Peer(cap, 60), Peer(cap, 0.1, True), Peer(cap, 0.2, True)
    )
    for expected in (older, silent, longest, idle):
        assert cap.admit(Peer(cap), "a")
        assert expected.is_ended
        assert cap.open == 6
    assert not cap.admit(Peer(cap), "a")
    assert [busy.is_ended, recent.is_ended] == [False, False]
    assert cap.ended == {SILENT: 0, DISPLACED: 4, REJECTED: 1}


def test_a_full_process_takes_the_room_of_any_address() -> None:
    cap = ConnectionCap(4)
    idle, _, _ = full(cap, Peer(cap, 5), Peer(cap), Peer(cap))
    assert cap.admit(Peer(cap), "b")
    assert cap.admit(Peer(cap), "c")
    assert idle.is_ended


def test_each_connection_is_looked_at_in_its_turn() -> None:
    cap = ConnectionCap(4 * EXAMINED)
    full(cap, *(Peer(cap) for _ in range(cap.share - 1)), Peer(cap, 5))
    assert [cap.admit(Peer(cap), "a") for _ in range(3)] == [False, False, True]


def test_the_end_of_a_connection_gives_its_room_back_once() -> None:
    cap = ConnectionCap(1)
    first, second = Peer(cap), Peer(cap)
    assert cap.admit(first, "a")
    assert not cap.admit(second, "a")
    cap.remove(second)
    cap.remove(first)
    cap.remove(first)
    assert cap.open == 0
    assert cap.admit(second, "a")


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.sampled_from([0.0, 5.0])), max_size=60))
def test_the_bounds_hold_whatever_comes(arrivals: list[tuple[str, bool, float]]) -> None:
    cap = ConnectionCap(8)
    admitted: dict[Peer, str] = {}
    for principal, fresh, idle in arrivals:
        peer = Peer(cap, idle, fresh)
        if cap.admit(peer, principal):
            admitted[peer] = principal
        is_open = [one for peer, one in admitted.items() if not peer.is_ended]
        assert cap.open == len(is_open) <= 8
        assert max(map(is_open.count, is_open), default=0) <= 6
        assert not any(peer.is_ended for peer in admitted if not peer.idle)


def test_the_log_has_one_line_a_second_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    times_s = iter((0.0, 0.5, 0.9, 1.0))
    connection_cap._limited = LogLimiter(connection_cap.logger, clock=lambda: next(times_s))
    cap = ConnectionCap(4)
    full(cap, *(Peer(cap) for _ in range(3)))
    with caplog.at_level(logging.WARNING, connection_cap.logger.name):
        for _ in range(4):
            cap.admit(Peer(cap), "a")
    first, last = (record.getMessage() for record in caplog.records)
    counts = "it has 3 of at most 3, all clients have 3 of at most 4"
    assert first == f"rejected a connection from a, as none is idle: {counts}"
    assert last == f"{first} (2 more like this in the last 1 s)"


@pytest.mark.parametrize(("open_files", "limit"), [(1024, 768), (1 << 20, MAX_CONNECTIONS)])
def test_a_process_keeps_descriptors_for_itself(monkeypatch: pytest.MonkeyPatch, open_files: int, limit: int) -> None:
    monkeypatch.setattr(connection_cap, "open_files_limit", lambda: open_files)
    assert ConnectionCap.of_process().limit == limit


@pytest.mark.parametrize(
    ("address", "principal"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:bbbb::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", "unknown"),
        (None, "unknown"),
        ("not an address", "unknown"),
    ],
)
def test_a_principal_is_an_address_or_a_site(address: str | None, principal: str) -> None:
    assert principal_of(address) == principal

"""The order in which servers of a cluster are tried, and their announcements of each other."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weir.bus.nats.access import MAX_DISCOVERED, ServerPool


def in_order(servers: list[Any]) -> None:
    """No shuffling."""


def pool(*urls: str) -> ServerPool:
    return ServerPool(urls, shuffle=in_order)


def places(of: ServerPool) -> list[str]:
    return [server.place for server in of.candidates()]


def test_the_one_that_was_lost_is_tried_last() -> None:
    three = pool("a:1", "b:1", "c:1")
    three.current = three.candidates()[0]
    assert places(three) == ["b:1", "c:1", "a:1"]
    three.current = three.candidates()[0]
    assert places(three) == ["c:1", "a:1", "b:1"]


def test_servers_that_others_tell_of_are_spoken_to_like_the_first() -> None:
    one = pool("tls://u:p@a:1")
    assert not one.is_clustered
    assert not one.learn({"cluster": "c", "connect_urls": ["10.0.0.1:2", "10.0.0.2:2", "[::1]:2"]})
    found = one.candidates()[1:]
    assert [server.place for server in found] == ["10.0.0.1:2", "10.0.0.2:2", "[::1]:2"]
    assert all((server.is_tls, server.user, server.password) == (True, "u", "p") for server in found)
    assert one.is_clustered
    assert one.replicas == 3


def test_replicas_follow_from_the_size_of_the_cluster() -> None:
    three = pool("a:1", "b:1", "c:1")
    assert three.replicas == 1, "which may be three servers that know nothing of each other"
    three.learn({"cluster": "c"})
    assert three.replicas == 3
    two = pool("a:1")
    two.learn({"cluster": "c", "connect_urls": ["a:1", "b:1"]})
    assert two.replicas == 1


def test_a_server_that_left_the_cluster_is_reported_once() -> None:
    three = pool("a:1")
    assert not three.learn({"cluster": "c", "connect_urls": ["a:1", "b:1", "c:1"]})
    assert three.learn({"cluster": "c", "connect_urls": ["a:1", "b:1"]})
    assert not three.learn({"cluster": "c", "connect_urls": ["a:1", "b:1"]})
    assert not three.learn({"cluster": "c", "connect_urls": ["a:1", "b:1", "c:1"]})
    assert places(three) == ["a:1", "b:1", "c:1"]


URLS = st.one_of(st.none(), st.integers(), st.text(max_size=8), st.from_regex(r"[a-d]:[1-3]", fullmatch=True))
INFOS = st.fixed_dictionaries(
    {}, optional={"cluster": st.text(max_size=2), "connect_urls": st.lists(URLS, max_size=80)}
)


@given(st.lists(st.tuples(INFOS, st.booleans()), max_size=20))
def test_configured_servers_are_tried_whatever_others_announce(told: list[tuple[dict[str, Any], bool]]) -> None:
    three = pool("x:1", "y:1")
    for info, is_lost in told:
        three.learn(info)
        found = three.candidates()
        assert {"x:1", "y:1"} <= {server.place for server in found}
        assert len(found) == len(set(found)) <= MAX_DISCOVERED + 3
        if is_lost:
            three.current = found[0]
            assert three.candidates()[-1] == found[0]

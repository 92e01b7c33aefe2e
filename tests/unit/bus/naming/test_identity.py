"""Names of processes show which of them share memory."""

import pytest

from weir.bus.naming.identity import (
    HOST_VARIABLE,
    host,
    host_of,
    lies_elsewhere,
    new_id,
    own_id,
    owner_of,
    shares_memory,
)


def test_processes_of_this_host_share_memory() -> None:
    assert shares_memory(new_id("worker"))
    assert shares_memory(own_id("worker", None))
    assert not shares_memory("worker-0000000-12345678")
    assert not shares_memory("w")


def test_so_do_those_that_were_given_a_name_which_they_keep() -> None:
    assert own_id("worker", "blue-1") == own_id("worker", "blue-1") == f"blue-1-{host()}-worker"
    assert shares_memory(own_id("worker", "blue-1"))


def test_the_names_of_segments_tell_where_they_lie() -> None:
    here, there = new_id("gateway"), "worker-01234567-89abcdef"
    assert owner_of(f"weir-{here}.131072") == here
    assert owner_of(f"weir-{there}_2_0.131072") == there
    assert not lies_elsewhere(f"weir-{here}.131072")
    assert lies_elsewhere(f"weir-{there}_2_0.131072")
    assert not lies_elsewhere("weir-anybody.1"), "a name that tells no host"
    assert owner_of("weir-a b.1") == owner_of("weir-a.1\r\nPUB x 0") == owner_of("other-a.1") == ""


def test_hosts_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    own = host.__wrapped__()
    monkeypatch.setenv(HOST_VARIABLE, "blue")
    blue = host.__wrapped__()
    assert host_of(f"worker-{blue}-1") == blue != own
    monkeypatch.setenv(HOST_VARIABLE, "green")
    assert host.__wrapped__() not in (own, blue)

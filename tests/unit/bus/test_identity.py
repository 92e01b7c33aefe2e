"""Names of processes tell who shares memory with whom."""

from bus.identity import host, new_id, own_id, shares_memory


def test_processes_of_this_host_share_memory() -> None:
    assert shares_memory(new_id("worker"))
    assert shares_memory(own_id("worker", None))
    assert not shares_memory("worker-0000000-12345678")
    assert not shares_memory("w")


def test_so_do_those_that_were_given_a_name_which_they_keep() -> None:
    assert own_id("worker", "blue-1") == own_id("worker", "blue-1") == f"blue-1-{host()}-worker"
    assert shares_memory(own_id("worker", "blue-1"))

"""`MemoryLedger`: nothing is held beyond the limit or a share, whatever is charged, released and closed."""

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.runtime import containment
from weir.runtime.memory_ledger import Account, MemoryLedger

LIMIT = 1000
KINDS = ("http", "grpc", "unsent")


def check(ledger: MemoryLedger, accounts: list[Account]) -> None:
    assert all(size >= 0 for size in ledger.held_bytes.values())
    assert sum(ledger.held_bytes.values()) == ledger.total_bytes == sum(account.held_bytes for account in accounts)
    assert ledger.total_bytes <= ledger.peak_bytes
    share = ledger.account_share_bytes
    beyond = [account for account in accounts if account.held_bytes > share]
    assert len(beyond) <= 1
    assert all(account.held_bytes <= ledger.largest_request_bytes for account in beyond)
    assert sum(min(account.held_bytes, share) for account in accounts) <= LIMIT
    for principal in {account.principal for account in accounts}:
        own = [account for account in accounts if account.principal == principal]
        assert sum(min(account.held_bytes, share) for account in own) <= ledger.principal_share_bytes


@given(st.integers(0, 2 * LIMIT), st.integers(0, 2**32))
def test_random_charges_stay_within_limit_and_shares(largest: int, seed: int) -> None:
    chance = Random(seed)
    ledger = MemoryLedger(LIMIT, largest)
    accounts = [ledger.account(f"client {number % 3}") for number in range(6)]
    held = [dict.fromkeys(KINDS, 0) for _ in accounts]
    for _ in range(60):
        position, kind = chance.randrange(len(accounts)), chance.choice(KINDS)
        account, mine = accounts[position], held[position]
        match chance.random():
            case number if number < 0.6:
                size = chance.choice([1, 30, 200, 450, 700, 1500])
                fits = account.fits(size)
                refused = ledger.refused.get(kind, 0)
                assert account.charge(kind, size) is fits
                assert ledger.refused.get(kind, 0) == refused + (not fits)
                mine[kind] += size if fits else 0
            case number if number < 0.95:
                size = chance.randint(0, mine[kind])
                account.release(kind, size)
                mine[kind] -= size
            case _:
                account.close()
                assert account.held_bytes == 0
                accounts[position] = ledger.account(account.principal)
                held[position] = dict.fromkeys(KINDS, 0)
        assert account.held_bytes == sum(held[position].values()) or account is not accounts[position]
        check(ledger, accounts)
    for account in accounts:
        account.close()
    assert ledger.total_bytes == 0
    assert not any(ledger.held_bytes.values())
    fresh = ledger.account("a new client")  # nothing of what went is remembered
    assert fresh.charge("http", ledger.account_share_bytes)


def test_a_connection_has_half_and_a_client_three_quarters() -> None:
    ledger = MemoryLedger(LIMIT)
    first, second, other = ledger.account("a"), ledger.account("a"), ledger.account("b")
    assert first.charge("http", 500)
    assert not first.charge("http", 1)
    assert second.charge("http", 200)
    assert not second.charge("http", 51)
    assert other.charge("grpc", 300)
    assert not other.charge("grpc", 1)
    assert ledger.refused == {"http": 2, "grpc": 1}
    assert ledger.held_bytes == {"http": 700, "grpc": 300}
    assert ledger.is_short


def test_the_less_is_left_the_less_one_connection_may_hold() -> None:
    ledger = MemoryLedger(10_000)
    large = [ledger.account("a") for _ in range(3)]
    assert [account.charge("http", 2_300) for account in large] == [True] * 3
    assert not large[0].charge("http", 200)  # 600 are left of 7500: it would hold 2500
    small = [ledger.account("a") for _ in range(40)]
    assert all(account.charge("http", 10) for account in small)
    assert not ledger.account("a").charge("http", 180)
    assert not large[0].charge("http", 1)
    assert small[0].charge("http", 100)
    large[0].close()  # what it was refused for ended it
    assert large[1].charge("http", 200)


def test_one_request_may_be_larger_than_its_share_and_costs_others_nothing_more() -> None:
    ledger = MemoryLedger(LIMIT, largest_request_bytes=3000)
    large, other = ledger.account("a"), ledger.account("b")
    assert large.charge("grpc", 400)
    assert large.charge("grpc", 2600)
    assert not large.charge("grpc", 1)
    assert other.charge("http", 500)
    assert not other.charge("http", 1)  # one account at a time is beyond its share
    large.release("grpc", 2700)
    assert other.charge("http", 1)
    assert not large.charge("grpc", 300)
    assert ledger.total_bytes == 801
    assert ledger.peak_bytes == 3500


@dataclass(eq=False)
class Request:
    """A request that tells what it holds."""

    held_bytes: int = 0

    def charge(self, account: Account, size: int) -> bool:
        granted = account.charge("grpc", size, self)
        self.held_bytes += size if granted else 0
        return granted


def test_many_requests_on_one_connection_have_its_share_together() -> None:
    ledger = MemoryLedger(LIMIT, largest_request_bytes=3000)
    connection = ledger.account("a", has_many=True)
    requests = [Request() for _ in range(20)]
    for _ in range(5):
        for request in requests:
            request.charge(connection, 50)
    assert connection.held_bytes == 500  # not 20 * 250
    assert connection.charge(
        "grpc", 1, requests[0], whole_bytes=600
    )  # it has announced that it is larger than the share


def test_small_requests_go_on_beside_the_one_that_is_larger_than_the_share() -> None:
    ledger = MemoryLedger(LIMIT, largest_request_bytes=3000)
    connection = ledger.account("a", has_many=True)
    large, small = Request(), Request()
    assert large.charge(connection, 3000)
    assert small.charge(connection, 500)
    assert not small.charge(connection, 1)
    assert not connection.charge("headers", 1)
    assert ledger.total_bytes == 3500


@given(st.integers(0, 3 * LIMIT), st.lists(st.tuples(st.integers(0, 5), st.integers(-800, 800))))
def test_whatever_requests_do_one_connection_holds_its_share_and_one_of_them(
    largest: int, steps: list[tuple[int, int]]
) -> None:
    ledger = MemoryLedger(LIMIT, largest)
    connection = ledger.account("a", has_many=True)
    requests = [Request() for _ in range(6)]
    peaks = [0] * 6
    for number, size in steps:
        request = requests[number]
        if size >= 0:
            request.charge(connection, size)
        else:
            released = min(-size, request.held_bytes)
            request.held_bytes -= released
            connection.release("grpc", released)
        held = sorted(request.held_bytes for request in requests)
        assert sum(held) == connection.held_bytes
        assert sum(held[:-1]) <= ledger.account_share_bytes
        assert held[-1] <= max(largest, ledger.account_share_bytes)
        peaks = [max(peak, request.held_bytes) for peak, request in zip(peaks, requests, strict=True)]
        assert sum(held) <= ledger.account_share_bytes or max(peaks) > ledger.account_share_bytes


def test_a_closed_account_holds_nothing_and_refuses_all() -> None:
    ledger = MemoryLedger(LIMIT)
    account = ledger.account("a")
    assert account.charge("http", 100)
    account.close()
    account.close()
    account.release("http", 100)
    assert not account.fits(1)
    assert not account.charge("http", 1)
    assert (ledger.total_bytes, ledger.refused) == (0, {})


def test_releasing_more_than_is_held_is_reported_and_releases_what_is_held(caplog: pytest.LogCaptureFixture) -> None:
    ledger = MemoryLedger(LIMIT)
    account = ledger.account("a")
    assert account.charge("http", 100)
    before = containment.failures().get("weir.runtime.memory_ledger: release", 0)
    account.release("http", 101)
    assert containment.failures()["weir.runtime.memory_ledger: release"] == before + 1
    assert ledger.total_bytes == account.held_bytes == 0

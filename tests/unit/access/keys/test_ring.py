"""Keys: who holds one is found while it is valid, and nobody else."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from weir.access.keys.ring import MAX_KEY_CHARACTERS, MAX_LIVE_KEYS, KeyProblem, KeyRecord, KeyRing

NAMES = st.sampled_from(["alice", "bob"])


class RingMachine(RuleBasedStateMachine):
    """Keys are made, rotated and revoked, while the clock goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000
        self.ring = KeyRing()
        self.ends_s: dict[str, tuple[str, float]] = {}  # name, and when it expires, by key

    def live(self, name: str) -> list[str]:
        return [key for key, (of, ends_s) in self.ends_s.items() if of == name and self.now_s < ends_s]

    @rule(name=NAMES, expires=st.integers(0, 5))
    def create(self, name: str, expires: int) -> None:
        expires_s = self.now_s + expires if expires else 0
        if len(self.live(name)) >= MAX_LIVE_KEYS:
            with pytest.raises(KeyProblem, match="revoke one of them first"):
                self.ring.create(name, ["r"], self.now_s, expires_s)
            return
        self.ring, key = self.ring.create(name, ["r"], self.now_s, expires_s)
        self.ends_s[key] = name, expires_s or float("inf")

    @rule(name=NAMES, overlap_s=st.integers(0, 5))
    def rotate(self, name: str, overlap_s: int) -> None:
        live = self.live(name)
        if len(live) != 1:
            with pytest.raises(KeyProblem):
                self.ring.rotate(name, self.now_s, overlap_s)
            return
        (old,) = live
        ends_s = self.ends_s[old][1]
        self.ring, key = self.ring.rotate(name, self.now_s, overlap_s)
        self.ends_s[key] = name, ends_s
        self.ends_s[old] = name, min(ends_s, self.now_s + overlap_s)

    @rule(name=NAMES)
    def revoke(self, name: str) -> None:
        if all(of != name for of, _ in self.ends_s.values()):
            with pytest.raises(KeyProblem, match="no key"):
                self.ring.revoke(name)
            return
        self.ring = self.ring.revoke(name)
        self.ends_s = {key: end for key, end in self.ends_s.items() if end[0] != name}

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @invariant()
    def each_key_lets_its_principal_in_while_it_is_valid(self) -> None:
        for key, (name, ends_s) in self.ends_s.items():
            found = self.ring.find(key, self.now_s)
            assert (found.name if found else None) == (name if self.now_s < ends_s else None)


TestRing = RingMachine.TestCase


def test_what_is_stored_and_listed_does_not_let_anybody_in() -> None:
    ring, key = KeyRing().create("alice", ["caller", "caller", "a"], 1000.7, tenant="t")
    (record,) = ring.records
    _, id, secret = key.split("_", 2)
    assert record == KeyRecord(id, "alice", ("a", "caller"), record.hash, 1000, 0, "t")
    assert secret not in repr(record)
    for shown in (record.hash, record.id, f"weir_{id}_{record.hash}", f"weir_{id}_", f"weir_{id}", f"weir__{secret}"):
        assert ring.find(shown, 1001) is None


@pytest.mark.parametrize("change", [str.upper, lambda key: key + "x", lambda key: key[:-1], lambda key: " " + key])
def test_another_text_is_no_key(change: object) -> None:
    ring, key = KeyRing().create("alice", ["caller"], 0)
    assert ring.find(change(key), 1) is None  # type: ignore[operator]


@pytest.mark.parametrize(
    "shown", ["", "weir_", "weir___", "x" * 1_000_000, "weir_" + "é" * MAX_KEY_CHARACTERS, "\udcff"]
)
def test_nothing_that_is_shown_raises(shown: str) -> None:
    assert KeyRing().find(shown, 0) is None


def test_a_key_is_revoked_by_its_id() -> None:
    ring, first = KeyRing().create("alice", ["caller"], 0)
    ring, second = ring.create("alice", ["caller"], 1)
    ring = ring.revoke(ring.records[0].id)
    assert ring.find(first, 2) is None
    assert ring.find(second, 2) is not None


def test_records_survive_their_storage() -> None:
    import msgspec

    ring, key = KeyRing().create("alice", ["caller"], 0, 100, "t")
    stored = msgspec.json.encode(ring.records)
    again = KeyRing(msgspec.json.decode(stored, type=list[KeyRecord]))
    assert again.find(key, 99) == ring.records[0]

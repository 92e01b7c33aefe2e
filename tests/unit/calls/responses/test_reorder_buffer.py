"""Random submissions, answers and departures: nothing is given out of order, nothing is lost, nobody is held up."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weir.calls.responses.delivery import ReorderBuffer

LINES = st.sampled_from("ab")
SIZES = st.integers(0, 1000)


class OrderMachine(RuleBasedStateMachine):
    """`open`: by line, the requests that have no last answer yet; `due`: what must still be given of each."""

    def __init__(self) -> None:
        super().__init__()
        self.order: ReorderBuffer[tuple[str, int, int, bool]] = ReorderBuffer()
        self.keys = 0
        self.lines: dict[str, list[int]] = defaultdict(list)  # in the order of submission, until the last was given
        self.open: dict[str, set[int]] = defaultdict(set)
        self.due: dict[tuple[str, int], list[tuple[int, int, bool]]] = defaultdict(list)
        self.answers = 0

    @rule(line=LINES)
    def submit(self, line: str) -> None:
        self.keys += 1
        self.order.enqueue(line, self.keys)
        self.lines[line].append(self.keys)
        self.open[line].add(self.keys)

    @precondition(lambda self: any(self.open.values()))
    @rule(data=st.data(), size_bytes=SIZES, is_last=st.booleans())
    def answer(self, data: st.DataObject, size_bytes: int, is_last: bool) -> None:
        line = data.draw(st.sampled_from([line for line in "ab" if self.open[line]]))
        key = data.draw(st.sampled_from(sorted(self.open[line])))
        self.answers += 1
        self.order.add(line, key, (line, key, self.answers, is_last), size_bytes, is_last)
        self.due[line, key].append((self.answers, size_bytes, is_last))
        if is_last:
            self.open[line].discard(key)
        self.take(line)

    @precondition(lambda self: any(self.lines.values()))
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        line = data.draw(st.sampled_from([line for line in "ab" if self.lines[line]]))
        key = data.draw(st.sampled_from(self.lines[line]))
        waiting = [(line, key, number, is_last) for number, _, is_last in self.due.get((line, key), ())]
        assert self.order.remove(line, key) == waiting
        assert self.order.remove(line, key) is None
        self.lines[line].remove(key)
        self.open[line].discard(key)
        self.due.pop((line, key), None)
        self.take(line)

    def take(self, line: str) -> None:
        """What is given is always the next answer of the request that was submitted first."""
        while (given := self.order.pop(line)) is not None:
            of, key, number, is_last = given
            assert (of, key) == (line, self.lines[line][0])
            assert self.due[line, key].pop(0)[0] == number
            if is_last:
                assert not self.due.pop((line, key))
                self.lines[line].pop(0)

    @invariant()
    def only_what_must_wait_waits(self) -> None:
        waiting = 0
        for line, keys in self.lines.items():
            for position, key in enumerate(keys):
                due = self.due.get((line, key), [])
                waiting += len(due)
                assert not due or position > 0
            assert self.order.is_next(line, keys[0]) if keys else not self.order.is_next(line, 1)
        assert self.order.buffered == waiting
        assert self.order.buffered_bytes == sum(size for due in self.due.values() for _, size, _ in due)
        assert len(self.order._requests) == sum(map(bool, self.lines.values()))

    def teardown(self) -> None:
        """Whatever came before, once the open ones end, everything is given."""
        for line in "ab":
            for key in sorted(self.open[line], reverse=True):
                self.order.add(line, key, (line, key, 0, True), 0, True)
                self.due[line, key].append((0, 0, True))
            self.take(line)
            assert not self.lines[line]
        assert self.order.buffered == self.order.buffered_bytes == 0


OrderMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestOrder = OrderMachine.TestCase


def test_removing_requests_takes_linear_time() -> None:
    """Each answer costs the same, however many wait: no search through a line."""
    order: ReorderBuffer[int] = ReorderBuffer()
    for key in range(50_000):
        order.enqueue("m", key)
    for key in reversed(range(50_000)):
        order.add("m", key, key, 1, True)
    assert order.is_full
    given = []
    while (answer := order.pop("m")) is not None:
        given.append(answer)
    assert given == list(range(50_000))
    assert not order.is_full

"""Which messages are purged: only such as are done with, whatever the order in which they end."""

from hypothesis import given, settings
from hypothesis import strategies as st

from weir.durable.consumer.acknowledger import AckBatcher


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(("open", "end", "due", "again")), st.integers(0, 40)), max_size=120))
def test_nothing_open_is_ever_removed(events: list[tuple[str, int]]) -> None:
    line, stream, now_s, last = AckBatcher(), set[int](), 0.0, 0
    is_open: list[int] = []
    for event, number in events:
        now_s += number / 40
        if event == "open":
            last += 1 + number % 3  # other subjects have sequences too
            stream.add(last)
            is_open.append(last)
            line.opened(last)
        elif event == "end" and is_open:
            sequence = is_open.pop(number % len(is_open))
            line.ended(sequence, str(sequence), now_s)
        elif event == "again" and stream:
            sequence = sorted(stream)[number % len(stream)]
            assert line.delivered_again(sequence, str(sequence)) == (sequence not in is_open)
        elif event == "due":
            due = line.due(now_s)
            removed = {s for s in stream if s < due.purge_below} | set(map(int, due.singles))
            assert not removed & set(is_open)
            assert {sequence for sequence, _ in due.purged} <= removed
            if number % 2:  # else the broker dies before it hears of it
                stream -= removed
    due = line.due(now_s, everything=True)
    for sequence in list(stream):
        if sequence not in is_open and sequence >= due.purge_below and str(sequence) not in due.singles:
            assert line.delivered_again(sequence, str(sequence))  # told before, and lost on its way: told again
    left = line.due(now_s, everything=True)
    gone = {s for s in stream if s < max(due.purge_below, left.purge_below)} | set(map(int, due.singles + left.singles))
    assert stream - gone == set(is_open)


def test_one_that_stays_open_makes_nothing_grow() -> None:
    line = AckBatcher()
    line.opened(1)
    for number in range(2, 30_000):
        line.opened(number)
        line.ended(number, "ack", 0.0)
        if number % 50 == 0:
            line.due(10.0)
    assert len(line) < 20_000
    assert len(line._acknowledged) + len(line._acknowledged_before) < 20_000
    line.due(10.0, everything=True)
    line.ended(1, "ack", 10.0)
    assert line.due(10.0).singles == ["ack"]

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.scheduling.requests import FormedQueue, keys, request
from weir.scheduler.batching.former import MAX_REQUESTS, EnsembleFormer, SingleFormer


def test_each_request_is_a_batch_in_the_order_they_came():
    formed = FormedQueue(SingleFormer(10))
    formed.enqueue([request(key=1, batch_size=2), request(key=2)])
    assert keys(formed.next_batch(0, full_only=True)) == [1]
    assert keys(formed.next_batch(0)) == [2]
    assert formed.next_batch(0) is None


def test_a_full_queue_takes_what_it_has_room_for():
    formed = FormedQueue(SingleFormer(3))
    assert formed.enqueue([request(key=1), request(key=2)]) == []
    refused = formed.enqueue([request(key=3), request(key=4), request(key=5)])
    assert keys(refused) == [4, 5]
    assert len(formed) == 3
    assert keys(formed.enqueue([request(key=6)])) == [6]


def test_returned_requests_may_exceed_the_limit_and_keep_their_positions():
    formed = FormedQueue(SingleFormer(2))
    formed.enqueue([request(20, key=3), request(30, key=4)])
    formed.put_back([request(25, key=5), request(10, key=1)])
    assert keys(formed.drain()) == [1, 3, 5, 4]


def test_a_cancelled_request_leaves_the_queue():
    formed = FormedQueue(SingleFormer(10))
    requests = [request(key=key) for key in (1, 2, 3)]
    formed.enqueue(requests)
    requests[1].cancelled = True
    formed.drop_cancelled([requests[1]])
    assert len(formed) == 2
    assert keys(formed.drain()) == [1, 3]
    assert len(formed) == 0


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("enqueue"), st.integers(1, 4)),
            st.tuples(st.just("take"), st.integers(1, 3)),
            st.tuples(st.just("put back"), st.integers(1, 3)),
            st.tuples(st.just("cancel"), st.integers(0, 5)),
            st.tuples(st.just("drain"), st.just(0)),
        ),
        max_size=60,
    )
)
def test_the_queue_is_always_in_the_order_of_arrival_and_loses_nothing(events: list[tuple[str, int]]):
    formed, out = FormedQueue(SingleFormer(8)), []
    waiting: list[int] = []
    for now, (name, number) in enumerate(events):
        if name == "enqueue":
            new = [request(now, key=now * 10 + i) for i in range(number)]
            refused = formed.enqueue(new)
            assert keys(refused) == keys(new)[len(new) - len(refused) :]
            assert len(refused) == max(0, len(waiting) + len(new) - max(8, len(waiting)))
            waiting += keys(new)[: len(new) - len(refused)]
        elif name == "take":
            for _ in range(number):
                batch = formed.next_batch(now)
                assert keys(batch) == (waiting[:1] or None)
                out += batch or []
                waiting = waiting[1:]
        elif name == "put back":
            formed.put_back(out[:number])
            waiting = sorted(waiting + [r.key for r in out[:number]])
            out = out[number:]
        elif name == "cancel" and waiting:
            chosen = waiting[number % len(waiting)]
            everything = formed.drain()
            formed.put_back(everything)
            gone = next(r for r in everything if r.key == chosen)
            gone.cancelled = True
            formed.drop_cancelled([gone])
            waiting.remove(chosen)
        elif name == "drain":
            assert keys(formed.drain()) == waiting
            waiting = []
        assert len(formed) == len(waiting)
    assert keys(formed.drain()) == waiting


def test_requests_to_an_ensemble_go_together_whatever_their_sizes():
    formed = FormedQueue(EnsembleFormer(1000))
    formed.enqueue([request(key=key, batch_size=7) for key in range(MAX_REQUESTS + 3)])
    assert keys(formed.next_batch(0, full_only=True)) == list(range(MAX_REQUESTS))
    assert len(formed.next_batch(0, full_only=True)) == 3
    assert formed.next_batch(0) is None


def test_a_batch_for_an_ensemble_fits_a_message():
    formed = FormedQueue(EnsembleFormer(10))
    large = [request(key=key, body=bytes(3 << 20)) for key in range(2)]
    formed.enqueue(large)
    assert [keys(formed.next_batch(0)) for _ in large] == [[0], [1]]


def test_a_request_lost_with_a_coordinator_is_sent_alone():
    formed = FormedQueue(EnsembleFormer())
    requests = [request(now, key=now) for now in (1, 2, 3, 4)]
    requests[1].run_alone()
    formed.enqueue(requests)
    assert [keys(formed.next_batch(9)) for _ in range(4)] == [[1], [2], [3, 4], None]

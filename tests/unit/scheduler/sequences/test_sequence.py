"""The progress of sequences and their states, and the slots of an instance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scheduling.requests import request
from weir.scheduler.batching.request import QueuedRequest
from weir.scheduler.sequences.sequence import ReplayBudget, SequenceProgress, SlottedInstance, StatefulSequence
from weir.schemas.wire.batches import NO_REPLY


def sequence(id: int, *requests: QueuedRequest, every: int = 0) -> StatefulSequence:
    made = StatefulSequence(id, SequenceProgress(every, ReplayBudget()))
    made.queue.extend(requests)
    return made


def replayed(progress: SequenceProgress) -> list[bytes]:
    """The bodies of the requests that run again until the state is complete."""
    bodies: list[bytes] = []
    while (replay := progress.next_replay) is not None:
        assert replay.gateway == NO_REPLY
        bodies.append(replay.body)
        progress.ended(replay)
    return bodies


def test_without_checkpoints_a_sequence_can_not_move():
    progress = SequenceProgress(0, ReplayBudget())
    progress.ended(request())
    assert not progress.can_move
    assert progress.next_replay is None


def test_after_a_move_the_requests_since_the_last_checkpoint_run_again():
    progress = SequenceProgress(3, ReplayBudget())
    for body in (b"1", b"2", b"3", b"4", b"5"):
        progress.ended(request(body=body))
    progress.move()
    place = progress.place(7, 0)
    assert (place.slot, place.number, place.restore) == (7, 3, True)
    assert replayed(progress) == [b"4", b"5"]
    assert progress.state_at == progress.number == 5
    assert progress.place(7, 0).restore is False, "the checkpoint is fetched once"


def test_before_the_first_checkpoint_a_move_replays_everything():
    progress = SequenceProgress(5, ReplayBudget())
    for body in (b"1", b"2"):
        progress.ended(request(body=body))
    progress.move()
    assert progress.place(0, 0).restore is False
    assert replayed(progress) == [b"1", b"2"]


def test_a_sequence_whose_requests_exceed_the_budget_can_move_again_after_the_next_checkpoint():
    budget = ReplayBudget(10)
    progress = SequenceProgress(3, budget)
    progress.ended(request(body=bytes(8)))
    assert progress.can_move
    progress.ended(request(body=bytes(8)))
    assert not progress.can_move
    assert budget.left_bytes == 10, "what was kept is released"
    progress.ended(request(body=b"x"))
    assert progress.can_move


def test_a_sequence_that_starts_again_forgets_its_past():
    budget = ReplayBudget()
    left = budget.left_bytes
    progress = SequenceProgress(4, budget)
    progress.ended(request(body=b"1"))
    progress.begin(9)
    assert (progress.run, progress.number, progress.state_at, budget.left_bytes) == (9, 0, 0, left)
    assert progress.next_replay is None


@given(st.integers(1, 4), st.lists(st.sampled_from(["request", "move", "replay"]), max_size=30))
def test_the_state_never_contains_a_request_twice(every: int, steps: list[str]):
    progress = SequenceProgress(every, ReplayBudget())
    sent: list[bytes] = []
    state: list[bytes] = []
    for step in steps:
        replay = progress.next_replay
        if step == "move":
            progress.move()
            state = sent[: progress.state_at]
        elif replay is not None:
            state.append(replay.body)
            progress.ended(replay)
        elif step == "request":
            body = b"%d" % len(sent)
            sent.append(body)
            state.append(body)
            progress.ended(request(body=body))
        assert state == sent[: progress.state_at]
        assert progress.number == len(sent)


def test_a_request_that_its_gateway_sent_again_is_recognised():
    one = sequence(1)
    one.ended = ("gateway", 5)
    assert one.has_run(request(key=5))
    assert one.has_run(request(key=4))
    assert not one.has_run(request(key=6))
    assert not one.has_run(request(key=5, gateway="another"))


def test_a_sequence_holds_its_waiting_and_its_running_request():
    waiting, running, other = request(), request(), request()
    one = sequence(1, waiting)
    one.running = running
    assert one.holds(waiting)
    assert one.holds(running)
    assert not one.holds(other)


@pytest.mark.parametrize(("most", "ids"), [(1, [2]), (2, [2, 4]), (9, [2, 4])])
def test_sequences_run_together_in_the_order_they_became_ready_if_their_shapes_agree(most: int, ids: list[int]):
    instance = SlottedInstance("w", 0, index=1, slots=[None] * 8)
    made = {id: sequence(id, request(shape_key=shape)) for id, shape in ((2, "a"), (3, "b"), (4, "a"))}
    for each in made.values():
        instance.make_ready(each)
    assert [each.id for each in instance.first_alike(most)] == ids
    instance.make_unready(made[2])
    instance.make_unready(made[2])
    assert [each.id for each in instance.first_alike(9)] == [3]

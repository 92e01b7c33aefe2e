"""Which calls are events, and how their arguments are packed."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.support.scheduling.requests import request
from weir.scheduler.model_scheduler import ModelScheduler
from weir.scheduler.recording.event_log import RecordedModelScheduler
from weir.scheduler.recording.event_rows import EVENTS, QUERIES, pack_event, unpack_event


def test_every_method_is_an_event_or_a_query():
    assert set(QUERIES) < set(vars(ModelScheduler))
    assert {"configure", "enqueue", "dispatch", "complete", "worker_lost", "expire"} < set(EVENTS)
    assert all(name in vars(RecordedModelScheduler) for name in EVENTS)


class Place(NamedTuple):
    rank: int = 0


NOWHERE = Place()


def test_named_tuples_and_identities_of_constants_are_preserved(monkeypatch: pytest.MonkeyPatch):
    """A policy may detect "none given" by an identity comparison."""
    monkeypatch.setattr(
        "weir.scheduler.recording.event_rows.RECORDED_PACKAGES", (__name__, "weir.scheduler.", "weir.schemas.")
    )
    for place in (NOWHERE, Place(3)):
        asked = request()
        asked.shape_key = place
        _, _, ((read,),), _ = unpack_event(pack_event(1, "enqueue", ([asked],), {}))
        assert type(read.shape_key) is Place
        assert (read.shape_key, read.shape_key is NOWHERE) == (place, place is NOWHERE)

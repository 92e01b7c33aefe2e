"""Requests that came after a takeover are admitted in order, whenever it is known what became of each."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weir.durable.requests.ordering import AdmissionOrder
from weir.durable.requests.request import Stage


@given(st.lists(st.sampled_from(["fresh", "unrecorded", "recorded"]), max_size=12), st.randoms())
def test_nobody_overtakes(kinds: list[str], draw: Any) -> None:
    admitted: list[Any] = []
    line = AdmissionOrder(admitted.append)
    all: list[Any] = []
    for sequence, _ in enumerate(kinds):
        all.append(SimpleNamespace(delivery=SimpleNamespace(sequence=sequence), stage=Stage.WAITING))
        line.add(all[-1], needs_lookup=kinds[sequence] != "fresh")
    asked = [(request, kind) for request, kind in zip(all, kinds, strict=True) if kind != "fresh"]
    draw.shuffle(asked)
    for request, kind in asked:
        if kind == "unrecorded":
            line.settled(request)
        else:
            request.stage = Stage.ENDED
            line.advance()
    line.advance()
    assert admitted == all
    assert len(line) == 0

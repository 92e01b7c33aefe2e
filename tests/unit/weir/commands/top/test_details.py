"""What `weir top` shows of one model: with an access policy also who has requests in flight."""

from __future__ import annotations

from tests.support.top_source import GivenSource
from weir.cluster.status.snapshot import CallerStatus
from weir.commands.top.details import detail_lines


def test_callers_are_listed_over_all_partitions_those_with_most_first() -> None:
    source = GivenSource()
    status = source.status()
    assert status is not None
    assert "CALLER" not in "\n".join(detail_lines("recognise_text", source.versions(), status, 100))
    callers = [
        CallerStatus(name="acme", in_flight=3, refused=0),
        CallerStatus(name="shop", in_flight=7, refused=12),
        CallerStatus(name="acme", in_flight=2, refused=1),
    ]
    queue = next(each for each in status.queues if each.model == "recognise_text")
    status = status.model_copy(update={"queues": [queue.model_copy(update={"callers": callers})]})
    lines = detail_lines("recognise_text", source.versions(), status, 100)
    start = next(number for number, line in enumerate(lines) if line.startswith("CALLER"))
    assert [line.split() for line in lines[start : start + 3]] == [
        ["CALLER", "IN", "FLIGHT", "REFUSED"],
        ["shop", "7", "12"],
        ["acme", "5", "1"],
    ]

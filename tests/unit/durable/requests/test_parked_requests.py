"""Durable requests that wait for versions which are away."""

from typing import Any, cast

from weir.durable.requests.ordering import ParkedRequests
from weir.durable.requests.request import DurableRequest


class Request:
    def __init__(self, version: str) -> None:
        self.version = version


def requests(*versions: str) -> list[DurableRequest]:
    return [cast(DurableRequest, Request(version)) for version in versions]


def test_a_version_that_is_away_holds_up_no_other() -> None:
    stalled = ParkedRequests()
    first, second, other, third = all = requests("1", "1", "2", "1")
    for request in all:
        stalled.add(request)
    entered: list[Any] = []

    def enter(request: DurableRequest) -> None:
        if request.version == "1":
            stalled.add(request)
        else:
            entered.append(request)

    stalled.retry(enter)
    assert entered == [other]
    assert list(stalled) == [first, second, third]
    assert (stalled.has("1"), stalled.has("2")) == (True, False)
    stalled.remove(first)
    stalled.retry(entered.append)
    assert entered == [other, second, third]
    assert not stalled.has("1")

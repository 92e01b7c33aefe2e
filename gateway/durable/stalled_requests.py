"""`StalledRequests`: durable requests whose model, or whose version of it, is away: by version, in the order they came.

A version that is away for days must not hold up requests for another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from gateway.durable.durable_request import DurableRequest


class StalledRequests:
    """See the module. They are as many as the lane holds at most."""

    def __init__(self) -> None:
        self._versions: dict[str, deque[DurableRequest]] = {}

    def __iter__(self) -> Iterator[DurableRequest]:
        for waiting in self._versions.values():
            yield from waiting

    def has(self, version: str) -> bool:
        """Whether requests for this version wait: who comes next waits behind them."""
        return version in self._versions

    def add(self, request: DurableRequest) -> None:
        """The request waits until what it asks for is there."""
        self._versions.setdefault(request.version, deque()).append(request)

    def remove(self, request: DurableRequest) -> None:
        """The request waits no more, if it did."""
        waiting = self._versions.get(request.version)
        if waiting is not None and request in waiting:
            waiting.remove(request)
            if not waiting:
                del self._versions[request.version]

    def try_again(self, enter: Callable[[DurableRequest], None]) -> None:
        """Has those enter whose version may be back; where the first one is added again, those behind it wait on."""
        for version in list(self._versions):
            waiting = self._versions.pop(version)
            while waiting and version not in self._versions:
                enter(waiting.popleft())
            if waiting:
                self._versions.setdefault(version, deque()).extend(waiting)

    def clear(self) -> None:
        """Nothing is here any more."""
        self._versions.clear()

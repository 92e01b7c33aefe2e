"""`AnswerOrder`: answers are given in the order in which their requests were submitted (`preserve_ordering`).

Sans-IO: requests join a *line*, their answers are added as they come, and `pop` gives those whose turn it is. An answer
waits for the last one of each request before it in its line. A request that is given up leaves, and holds up nobody.
Source: Triton's dynamic batcher, which releases the responses of a model version in the order of their enqueueing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_HELD_ANSWERS = 50_000
"""Answers that wait for those of earlier requests, of all lines; a request whose answers go beyond it is ended."""

MAX_HELD_BYTES = 512 << 20
"""Their outputs together."""


class AnswerOrder(Generic[T]):
    """See the module. `held_answers` and `held_bytes` are what waits now, in all lines."""

    def __init__(self) -> None:
        # By line, the requests in order, each with the answers that wait: (answer, bytes, whether it is the last).
        self._lines: dict[Hashable, OrderedDict[int, deque[tuple[T, int, bool]] | None]] = {}
        self.held_answers = 0
        self.held_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether a request whose turn it isn't should not go on answering."""
        return self.held_answers >= MAX_HELD_ANSWERS or self.held_bytes >= MAX_HELD_BYTES

    def join(self, line: Hashable, key: int) -> None:
        """A request was submitted, behind all that are in its line; `key` is unique there."""
        requests = self._lines.get(line)
        if requests is None:
            requests = self._lines[line] = OrderedDict()
        requests[key] = None

    def is_next(self, line: Hashable, key: int) -> bool:
        """Whether it is the turn of this request."""
        requests = self._lines.get(line)
        return requests is not None and next(iter(requests)) == key

    def add(self, line: Hashable, key: int, answer: T, size_bytes: int, is_last: bool) -> None:
        """An answer to a request that is in the line; nothing may follow the last one."""
        requests = self._lines[line]
        held = requests[key]
        if held is None:
            held = requests[key] = deque()
        held.append((answer, size_bytes, is_last))
        self.held_answers += 1
        self.held_bytes += size_bytes

    def pop(self, line: Hashable) -> T | None:
        """The answer that is to be given now, None when the next one hasn't come."""
        requests = self._lines.get(line)
        if requests is None:
            return None
        held = next(iter(requests.values()))
        if not held:
            return None
        answer, size_bytes, is_last = held.popleft()
        self.held_answers -= 1
        self.held_bytes -= size_bytes
        if is_last:
            requests.popitem(last=False)
            if not requests:
                del self._lines[line]
        return answer

    def leave(self, line: Hashable, key: int) -> list[T] | None:
        """A request was given up: returns its answers that waited, None when it was over before."""
        requests = self._lines.get(line)
        if requests is None or key not in requests:
            return None
        held = requests.pop(key) or ()
        self.held_answers -= len(held)
        self.held_bytes -= sum(size_bytes for _, size_bytes, _ in held)
        if not requests:
            del self._lines[line]
        return [answer for answer, _, _ in held]

"""`LocalCache`: answers in this process's memory; when it is full, what was used longest ago goes."""

from __future__ import annotations

from collections import OrderedDict

from calls.cached_answer import CachedAnswer


class LocalCache:
    """At most `size_bytes` of answers (their `size_bytes`), by key."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._answers: OrderedDict[bytes, CachedAnswer] = OrderedDict()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, key: bytes) -> CachedAnswer | None:
        """The answer, which counts as used now."""
        answer = self._answers.get(key)
        if answer is not None:
            self._answers.move_to_end(key)
        return answer

    def insert(self, key: bytes, answer: CachedAnswer) -> bool:
        """Keeps an answer, in the place of an earlier one; False when it is larger than the whole cache."""
        size_bytes = answer.size_bytes
        if size_bytes > self._size_bytes:
            return False
        earlier = self._answers.pop(key, None)
        if earlier is not None:
            self.used_bytes -= earlier.size_bytes
        while self.used_bytes + size_bytes > self._size_bytes:
            _, oldest = self._answers.popitem(last=False)
            self.used_bytes -= oldest.size_bytes
        self._answers[key] = answer
        self.used_bytes += size_bytes
        return True

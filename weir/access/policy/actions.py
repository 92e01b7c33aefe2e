"""`Action`: what a principal may do, in the words of a policy. Each door of Weir names one for each of its operations."""

from __future__ import annotations

from enum import Enum


class Action(Enum):
    """One kind of operation. `is_of_model`: it may be allowed for some models; the others concern the whole server."""

    HEALTH = ("health", True)
    METADATA = ("metadata", True)
    INFER = ("infer", True)
    STATISTICS = ("statistics", True)
    LOAD = ("load", True)
    TRAFFIC = ("traffic", True)
    TRACE = ("trace", True)
    JOBS = ("jobs", True)
    DEAD_LETTERS = ("dead-letters", True)
    LOGS = ("logs", False)
    SHARED_MEMORY = ("shm", False)
    METRICS = ("metrics", False)
    CONSOLE_READ = ("console-read", False)
    CONSOLE_CHANGE = ("console-change", False)

    is_of_model: bool

    # That of `Enum` is Python code, and decisions are looked up by action for every request.
    __hash__ = object.__hash__

    def __new__(cls, word: str, is_of_model: bool) -> Action:
        """An action whose value is its word in a policy."""
        action = object.__new__(cls)
        action._value_ = word
        action.is_of_model = is_of_model
        return action


ALL_ACTIONS = frozenset(Action)
"""What "*" stands for in a rule."""

"""The state of a `ModelScheduler` as bytes, so that a file of an event log can begin in the middle of its life.

Follows every object that the scheduler holds: containers, classes of `scheduler`, configurations. Of a request it leaves
out the frame, and of its body all but the length. What else a policy might hold (a function, a file) can't be kept:
`UnknownState`. Reading makes objects of classes of `scheduler` and `schemas`, and calls none of their code.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from itertools import count
from typing import Any

import msgpack

from scheduler.event_rows import OURS, named_tuple, our_class, zeros
from scheduler.model_scheduler import ModelScheduler
from scheduler.queued_request import NO_FRAME, QueuedRequest
from schemas.config_message import ConfigMessage

_SCALARS = (bool, int, float, str, bytes, type(None))
_CONTAINERS: dict[str, type] = {"list": list, "deque": deque, "set": set}
_MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_IMMUTABLE: dict[str, type] = {"tuple": tuple, "frozenset": frozenset}
_FACTORIES: dict[str, type] = {"dict": dict, "list": list, "int": int, "set": set, "deque": deque}
_PLAIN_OBJECT, _NEXT_BATCH_ID, _CONFIG, _ENUM, _INSTANCE, _NAMED_TUPLE = (
    "object",
    "next",
    "config",
    "enum",
    "new",
    "row",
)
_COUNT, _NEXT_OF = "count", "next of"


_METHOD_OF_COUNT = type(count().__next__)


class UnknownState(ValueError):
    """Something that is in no snapshot, or bytes that are none."""


def pack_state(scheduler: ModelScheduler, next_batch_id: Callable[[], int], without: Iterable[str] = ()) -> bytes:
    """The state of the scheduler, which draws its batch ids from `next_batch_id`; `without` these attributes.

    Raises UnknownState for what can't be kept.
    """
    writer = _Writer(next_batch_id)
    attributes = {name: value for name, value in vars(scheduler).items() if name not in set(without)}
    writer.reference(attributes)
    return bytes(msgpack.packb(writer.written()))


def unpack_state(data: bytes, next_batch_id: Callable[[], int]) -> ModelScheduler:
    """A scheduler in the state that was packed; it draws batch ids from `next_batch_id`. Raises UnknownState."""
    try:
        attributes = _Reader(msgpack.unpackb(data, strict_map_key=False), next_batch_id).read()
        scheduler = ModelScheduler.__new__(ModelScheduler)
        vars(scheduler).update(attributes)
    except (ValueError, TypeError, LookupError, AttributeError, ImportError, msgpack.UnpackException) as error:
        raise UnknownState(f"not the state of a scheduler: {error}") from error
    return scheduler


class _Writer:
    """Numbers objects as it meets them; a reference is a list with the number, anything else stands for itself."""

    def __init__(self, next_batch_id: Callable[[], int]) -> None:
        self._next_batch_id = next_batch_id
        self._numbers: dict[int, int] = {}
        self._met: list[Any] = []  # kept alive: a number stands for an identity

    def reference(self, value: Any) -> Any:
        if type(value) in _SCALARS:
            return value
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._met)
            self._met.append(value)
        return [number]

    def written(self) -> list[Any]:
        """A row for each object met, in order; writing one may meet others."""
        rows: list[Any] = []
        while len(rows) < len(self._met):
            rows.append(self._row(self._met[len(rows)]))
        return rows

    def _row(self, value: Any) -> Any:
        kind, refer = type(value), self.reference
        name = kind.__name__
        if kind in (*_CONTAINERS.values(), *_IMMUTABLE.values()):
            return name, [refer(item) for item in value]
        if kind in _MAPPINGS.values() or kind is defaultdict:
            factory = getattr(value, "default_factory", None)
            return name, [(refer(k), refer(v)) for k, v in value.items()], factory and factory.__name__
        if kind is object:
            return (_PLAIN_OBJECT,)
        if kind is count:
            # What it would give next is told by nothing but its name.
            return _COUNT, [int(number) for number in repr(value)[len("count(") : -1].split(",")]
        if kind is _METHOD_OF_COUNT and type(value.__self__) is count and value.__name__ == "__next__":
            return _NEXT_OF, refer(value.__self__)
        if value == self._next_batch_id:
            return (_NEXT_BATCH_ID,)
        if kind.__module__.partition(".")[0] in OURS:
            return self._of_our_class(value, (kind.__module__, kind.__qualname__))
        raise UnknownState(f"a {kind.__module__}.{kind.__qualname__} can't be kept")

    def _of_our_class(self, value: Any, name: tuple[str, str]) -> Any:
        if isinstance(value, ConfigMessage):
            return _CONFIG, name, value.model_dump(exclude_defaults=True)
        if isinstance(value, Enum):
            return _ENUM, name, value.value
        if isinstance(value, tuple):
            return _NAMED_TUPLE, name, [self.reference(item) for item in value]
        state = dict(_attributes(value))
        if isinstance(value, QueuedRequest):
            state["body"] = len(value.body)
            del state["frame"]
        return _INSTANCE, name, [(attribute, self.reference(content)) for attribute, content in state.items()]


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


class _Reader:
    """Makes what can be filled later first, then what can't, then fills: objects before what may look at their hash."""

    def __init__(self, rows: list[Any], next_batch_id: Callable[[], int]) -> None:
        self._rows = rows
        self._next_batch_id = next_batch_id
        self._made: dict[int, Any] = {}

    def read(self) -> Any:
        rows = self._rows
        for number, row in enumerate(rows):
            if row[0] not in _IMMUTABLE and row[0] not in (_NAMED_TUPLE, _NEXT_OF):
                self._made[number] = self._shell(row)
        for number, row in enumerate(rows):
            if row[0] == _INSTANCE:
                for name, content in row[2]:
                    object.__setattr__(self._made[number], name, self._value(content))
                if isinstance(self._made[number], QueuedRequest):
                    self._made[number].body = zeros(self._made[number].body)
                    self._made[number].frame = NO_FRAME
        for number, row in enumerate(rows):
            made: Any = self._made.get(number)
            if row[0] in _MAPPINGS or row[0] == "defaultdict":
                made.update((self._value(key), self._value(value)) for key, value in row[1])
            elif row[0] in ("list", "deque"):
                made.extend(map(self._value, row[1]))
            elif row[0] == "set":
                made.update(map(self._value, row[1]))
        return self._made[0]

    def _shell(self, row: Any) -> Any:
        kind = row[0]
        if kind in _CONTAINERS or kind in _MAPPINGS:
            return (_CONTAINERS.get(kind) or _MAPPINGS[kind])()
        if kind == "defaultdict":
            return defaultdict(_FACTORIES[row[2]])
        if kind == _PLAIN_OBJECT:
            return object()
        if kind == _COUNT:
            return count(*row[1])
        if kind == _NEXT_BATCH_ID:
            return self._next_batch_id
        found = our_class(*row[1])
        if kind == _CONFIG and issubclass(found, ConfigMessage):
            return found.model_validate(row[2])
        if kind == _ENUM and issubclass(found, Enum):
            return found(row[2])
        if kind == _INSTANCE:
            return object.__new__(found)
        raise UnknownState(f"a {kind}")

    def _value(self, reference: Any) -> Any:
        if not isinstance(reference, list):
            return reference
        number = reference[0]
        if number not in self._made:
            row = self._rows[number]
            if row[0] == _NEXT_OF:
                self._made[number] = self._value(row[1]).__next__
            elif row[0] == _NAMED_TUPLE:
                self._made[number] = named_tuple(row[1][0], row[1][1], map(self._value, row[2]))
            else:
                self._made[number] = _IMMUTABLE[row[0]](map(self._value, row[1]))
        return self._made[number]

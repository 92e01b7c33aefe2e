"""The state of a `ModelScheduler` as bytes, so that each file of an event log can be replayed on its own.

A snapshot follows every object that the policy holds: containers, classes of `scheduler`, configurations. Of a
request it omits the frame and the body except for its length. Anything else (a function, a file) raises
`UnsupportedState`. Reading creates objects of classes of `scheduler` and `schemas` without calling their code.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from itertools import count
from typing import Any

import msgpack

from weir.scheduler.batching.request import NO_FRAME, QueuedRequest
from weir.scheduler.model_scheduler import ModelScheduler
from weir.scheduler.recording.event_rows import RECORDED_PACKAGES, named_tuple, resolve_class, zeros
from weir.schemas.config.model_config import ConfigMessage

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


class UnsupportedState(ValueError):
    """An object that a snapshot can not hold, or bytes that are not a snapshot."""


def pack_state(scheduler: ModelScheduler, next_batch_id: Callable[[], int], without: Iterable[str] = ()) -> bytes:
    """Returns the state of a policy that draws its batch ids from `next_batch_id`, `without` these attributes.

    Raises UnsupportedState.
    """
    writer = _Writer(next_batch_id)
    attributes = {name: value for name, value in vars(scheduler).items() if name not in set(without)}
    writer.reference(attributes)
    return bytes(msgpack.packb(writer.written()))


def unpack_state(data: bytes, next_batch_id: Callable[[], int]) -> ModelScheduler:
    """Creates a policy in the packed state; it draws batch ids from `next_batch_id`. Raises UnsupportedState."""
    try:
        attributes = _Reader(msgpack.unpackb(data, strict_map_key=False), next_batch_id).read()
        scheduler = ModelScheduler.__new__(ModelScheduler)
        vars(scheduler).update(attributes)
    except (ValueError, TypeError, LookupError, AttributeError, ImportError, msgpack.UnpackException) as error:
        raise UnsupportedState(f"malformed scheduler state: {error}") from error
    return scheduler


class _Writer:
    """Numbers objects as it meets them. A reference is a list with the number; any other value stands for itself."""

    def __init__(self, next_batch_id: Callable[[], int]) -> None:
        self._next_batch_id = next_batch_id
        self._numbers: dict[int, int] = {}
        self._objects: list[Any] = []  # keeps objects alive, because a number stands for an identity

    def reference(self, value: Any) -> Any:
        if type(value) in _SCALARS:
            return value
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return [number]

    def written(self) -> list[Any]:
        """Returns a row for each object, in order; writing one may add others."""
        rows: list[Any] = []
        while len(rows) < len(self._objects):
            rows.append(self._row(self._objects[len(rows)]))
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
            # Only its repr shows the next value.
            return _COUNT, [int(number) for number in repr(value)[len("count(") : -1].split(",")]
        if kind is _METHOD_OF_COUNT and type(value.__self__) is count and value.__name__ == "__next__":
            return _NEXT_OF, refer(value.__self__)
        if value == self._next_batch_id:
            return (_NEXT_BATCH_ID,)
        if kind.__module__.startswith(RECORDED_PACKAGES):
            return self._row_of_own_class(value, (kind.__module__, kind.__qualname__))
        raise UnsupportedState(f"a {kind.__module__}.{kind.__qualname__} can not be stored")

    def _row_of_own_class(self, value: Any, name: tuple[str, str]) -> Any:
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
    """Creates mutable objects, then immutable ones, then fills them: objects before containers that use their hash."""

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
                self._fill_instance(self._made[number], row)
        for number, row in enumerate(rows):
            self._fill_container(self._made.get(number), row)
        return self._made[0]

    def _fill_instance(self, made: Any, row: Any) -> None:
        for name, content in row[2]:
            object.__setattr__(made, name, self._value(content))
        if isinstance(made, QueuedRequest):
            made.body = zeros(made.body)  # a snapshot holds the length of the body
            made.frame = NO_FRAME

    def _fill_container(self, made: Any, row: Any) -> None:
        if row[0] in _MAPPINGS or row[0] == "defaultdict":
            made.update((self._value(key), self._value(value)) for key, value in row[1])
        elif row[0] in ("list", "deque"):
            made.extend(map(self._value, row[1]))
        elif row[0] == "set":
            made.update(map(self._value, row[1]))

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
        found = resolve_class(*row[1])
        if kind == _CONFIG and issubclass(found, ConfigMessage):
            return found.model_validate(row[2])
        if kind == _ENUM and issubclass(found, Enum):
            return found(row[2])
        if kind == _INSTANCE:
            return object.__new__(found)
        raise UnsupportedState(f"unknown kind of object: {kind}")

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

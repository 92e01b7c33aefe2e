"""The rows of an event log: what was asked of a `ModelScheduler`, and a digest of what it decided.

A log is a msgpack stream: a header (a map, see `header`), then one row for each event,
`[event, batch ids, digest]`. `event` is the msgpack of (number, method, arguments, arguments by name). The batch ids are
those that were drawn during the event, for models draw them from one counter. The digest is over the event and the
actions that came of it, so a row that was changed is noticed, and so is a policy that decides otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from hashlib import blake2b
from importlib import import_module
from operator import attrgetter
from typing import Any

import msgpack

from scheduler.batch import Batch
from scheduler.model_scheduler import ModelScheduler
from scheduler.placement import Instance
from scheduler.queued_request import NO_FRAME, QueuedRequest
from schemas.errors import WeirError
from schemas.model_config import ModelConfig

FORMAT = "weir scheduler events"
FORMAT_VERSION = 5

QUESTIONS = (
    "waiting",
    "waiting_in",
    "versions",
    "oldest_us",
    "workers",
    "needs",
    "cancelled_in_flight",
    "failures",
    "in_flight_on",
)
"""What `ModelScheduler` only tells; all its other methods are events."""

EVENTS = tuple(name for name in vars(ModelScheduler) if not name.startswith("_") and name not in QUESTIONS)
"""The methods of `ModelScheduler` that change something."""

_DIGEST_BYTES = 8
_REQUEST, _CONFIG, _SET, _NAMED_TUPLE = 1, 2, 3, 4

OURS = ("scheduler", "schemas")
"""Packages whose classes may be named in a log."""

_NO_FACTS = ("frame", "body", "place")  # `place` is the scheduler's own note, not there yet when a request comes
REQUEST_FIELDS = tuple(name for name in QueuedRequest.__slots__ if name not in _NO_FACTS)
"""What is kept of a request, in order; the length of its body stands behind."""

_facts = attrgetter(*REQUEST_FIELDS)


zeros = cache(bytes)
"""A body of so many bytes: of a body only the length matters to a policy, and many requests may share one."""


def header(model: str, options: Mapping[str, int], first: int, unix_us: int, state: bytes | None) -> bytes:
    """The head of a file for `model` whose first event has the number `first`.

    `options` are those of `ModelScheduler`, `state` is what `pack_state` gives for the scheduler before it, None where
    it is new.
    """
    head = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "model": model,
        "options": options,
        "first": first,
        "unix_us": unix_us,
        "request_fields": REQUEST_FIELDS,
        "state": state,
    }
    return bytes(msgpack.packb(head))


def our_class(module: str, name: str) -> type:
    """The class of this qualified name in one of our modules; ValueError, ImportError or AttributeError if none is."""
    if module.partition(".")[0] not in OURS:
        raise ValueError(f"a class of {module}")
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, type):
        raise ValueError(f"{module}.{name} is no class")
    return found


def named_tuple(module: str, name: str, items: Iterable[Any]) -> Any:
    """The named tuple of this class; where its module has a constant like it, that: it may be told by its identity."""
    kind = our_class(module, name)
    if not issubclass(kind, tuple):
        raise ValueError(f"{module}.{name} is no named tuple")
    made = tuple.__new__(kind, items)
    return next((constant for constant in _constants(kind) if constant == made), made)


@cache
def _constants(kind: type) -> list[Any]:
    return [value for value in vars(import_module(kind.__module__)).values() if type(value) is kind]


def kept(argument: Any) -> Any:
    """The argument, in a form that can be read twice."""
    if isinstance(argument, Iterator):
        return list(argument)
    return argument


def pack_event(number: int, method: str, arguments: tuple[Any, ...], by_name: Mapping[str, Any]) -> bytes:
    """The first part of a row; the arguments are `kept`. To be called before the method, which changes requests."""
    return bytes(_event_packer.pack((number, method, arguments, by_name)))


def unpack_event(event: bytes) -> tuple[int, str, list[Any], dict[str, Any]]:
    """(number, method, arguments, arguments by name), ready to call the method with. Raises ValueError or TypeError."""
    number, method, arguments, by_name = msgpack.unpackb(event, ext_hook=_from_extension, strict_map_key=False)
    if method not in EVENTS or (type(number), type(arguments), type(by_name)) != (int, list, dict):
        raise ValueError(f"no event of a scheduler: {method!r}")
    return number, method, arguments, by_name


def pack_row(event: bytes, batch_ids: list[int], digest: bytes) -> bytes:
    """The whole row."""
    return bytes(msgpack.packb((event, batch_ids, digest)))


def digest_of(event: bytes, actions: Any) -> bytes:
    """What stands for an event and what a method has returned."""
    return blake2b(event + _action_packer.pack(actions), digest_size=_DIGEST_BYTES).digest()


# How what is not plain is written


def _of_event(value: Any) -> Any:
    if type(value) is QueuedRequest:
        return msgpack.ExtType(_REQUEST, _facts_packer.pack([*_facts(value), len(value.body)]))
    if isinstance(value, ModelConfig):
        return msgpack.ExtType(_CONFIG, _plain_packer.pack(value.model_dump(exclude_defaults=True)))
    if isinstance(value, set | frozenset):
        return msgpack.ExtType(_SET, _plain_packer.pack(sorted(value)))
    return _of_any(value)


def _of_action(value: Any) -> Any:
    if type(value) is QueuedRequest:
        return value.gateway, value.key
    if isinstance(value, Batch):
        return [getattr(value, name) for name in Batch.__slots__]
    if isinstance(value, Instance):
        return value.worker, value.number
    if isinstance(value, WeirError):
        return value.code.name, value.message
    if isinstance(value, set | frozenset):
        return sorted(value)
    return _of_any(value)


def _of_fact(value: Any) -> Any:
    if isinstance(value, tuple):
        if type(value) is tuple:
            return list(value)
        kind = type(value)
        return msgpack.ExtType(_NAMED_TUPLE, _plain_packer.pack([kind.__module__, kind.__qualname__, list(value)]))
    return _of_any(value)


def _of_any(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} can't be kept")


def _packer(default: Callable[[Any], Any], strict_types: bool = False) -> msgpack.Packer:
    return msgpack.Packer(default=default, strict_types=strict_types, use_bin_type=True, autoreset=True)


_plain_packer = _packer(_of_any)
_facts_packer = _packer(_of_fact, strict_types=True)  # named tuples come out as such
_event_packer = _packer(_of_event)
_action_packer = _packer(_of_action)


def _from_extension(code: int, data: bytes) -> Any:
    value = msgpack.unpackb(data, ext_hook=_from_extension, strict_map_key=False)
    if code == _REQUEST:
        return _request(value)
    if code == _CONFIG:
        return ModelConfig.model_validate(value)
    if code == _SET:
        return frozenset(value)
    if code == _NAMED_TUPLE:
        return named_tuple(*value)
    raise ValueError(f"extension {code}")


def _request(facts: list[Any]) -> QueuedRequest:
    request = QueuedRequest()
    for name, fact in zip((*REQUEST_FIELDS, "body"), facts, strict=True):
        setattr(request, name, fact)
    request.body = zeros(facts[-1])
    request.frame = NO_FRAME
    return request

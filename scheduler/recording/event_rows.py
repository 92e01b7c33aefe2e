"""The rows of an event log: the calls of a `ModelScheduler`, and a digest of each result.

A log is a msgpack stream: a header (a map, see `header`), then one row for each event, `[event, batch ids, digest]`.
`event` is the msgpack of (number, method, arguments, keyword arguments). The batch ids are those drawn during the
event, since the models of a scheduler share one counter. The digest covers the event and its resulting actions, so
that a modified row is noticed, and so is a policy that decides differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from hashlib import blake2b
from importlib import import_module
from operator import attrgetter
from typing import Any

import msgpack

from weir.scheduler.batching.batch import Batch
from weir.scheduler.batching.request import NO_FRAME, QueuedRequest
from weir.scheduler.model_scheduler import ModelScheduler
from weir.scheduler.placement.instances import Instance
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError

FORMAT = "weir scheduler events"
FORMAT_VERSION = 8

QUERIES = (
    "waiting",
    "waiting_in",
    "versions",
    "oldest_us",
    "workers",
    "needs",
    "cancelled_in_flight",
    "failures",
    "in_flight_on",
    "direct_request_us",
)
"""Methods of `ModelScheduler` without side effects; all others are events."""

EVENTS = tuple(name for name in vars(ModelScheduler) if not name.startswith("_") and name not in QUERIES)
"""The methods of `ModelScheduler` that change its state."""

_DIGEST_BYTES = 8
_REQUEST, _CONFIG, _SET, _NAMED_TUPLE = 1, 2, 3, 4

RECORDED_PACKAGES = ("weir.scheduler.", "weir.schemas.")
"""Packages whose classes a log may name."""

_OMITTED_FIELDS = ("frame", "body", "place")  # `place` is set by the policy
REQUEST_FIELDS = tuple(name for name in QueuedRequest.__slots__ if name not in _OMITTED_FIELDS)
"""The recorded fields of a request, in order, followed by the length of its body."""

_request_fields = attrgetter(*REQUEST_FIELDS)


zeros = cache(bytes)
"""Returns a body of this many bytes: only the length matters to a policy, and many requests may share one body."""


def header(model: str, options: Mapping[str, int], first: int, unix_us: int, state: bytes | None) -> bytes:
    """Returns the header of a file for `model` whose first event has the number `first`.

    `options` are those of `ModelScheduler`, `state` is the result of `pack_state` before the first event, None for a
    new policy.
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


def resolve_class(module: str, name: str) -> type:
    """Returns the class of this qualified name in one of our modules; raises ValueError, ImportError or AttributeError."""
    if not module.startswith(RECORDED_PACKAGES):
        raise ValueError(f"{module} is not one of our modules")
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, type):
        raise ValueError(f"{module}.{name} is not a class")
    return found


def named_tuple(module: str, name: str, items: Iterable[Any]) -> Any:
    """Returns the named tuple of this class; an equal constant of its module is preferred, to preserve identities."""
    kind = resolve_class(module, name)
    if not issubclass(kind, tuple):
        raise ValueError(f"{module}.{name} is not a named tuple")
    made = tuple.__new__(kind, items)
    return next((constant for constant in _constants(kind) if constant == made), made)


@cache
def _constants(kind: type) -> list[Any]:
    return [value for value in vars(import_module(kind.__module__)).values() if type(value) is kind]


def reusable(argument: Any) -> Any:
    """Returns the argument in a form that can be read twice."""
    if isinstance(argument, Iterator):
        return list(argument)
    return argument


def pack_event(number: int, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> bytes:
    """Returns the first part of a row. Call it before the method, which changes requests, with `reusable` arguments."""
    return bytes(_event_packer.pack((number, method, arguments, keywords)))


def unpack_event(event: bytes) -> tuple[int, str, list[Any], dict[str, Any]]:
    """Returns (number, method, arguments, keyword arguments) to call the method. Raises ValueError or TypeError."""
    number, method, arguments, keywords = msgpack.unpackb(event, ext_hook=_from_extension, strict_map_key=False)
    if method not in EVENTS or (type(number), type(arguments), type(keywords)) != (int, list, dict):
        raise ValueError(f"{method!r} is not an event of a scheduler")
    return number, method, arguments, keywords


def pack_row(event: bytes, batch_ids: list[int], digest: bytes) -> bytes:
    """Returns the whole row."""
    return bytes(msgpack.packb((event, batch_ids, digest)))


def digest_of(event: bytes, actions: Any) -> bytes:
    """Returns the digest of an event and of what its method returned."""
    return blake2b(event + _action_packer.pack(actions), digest_size=_DIGEST_BYTES).digest()


# Packing of other types


def _encode_event(value: Any) -> Any:
    if type(value) is QueuedRequest:
        return msgpack.ExtType(_REQUEST, _field_packer.pack([*_request_fields(value), len(value.body)]))
    if isinstance(value, ModelConfig):
        return msgpack.ExtType(_CONFIG, _plain_packer.pack(value.model_dump(exclude_defaults=True)))
    if isinstance(value, set | frozenset):
        return msgpack.ExtType(_SET, _plain_packer.pack(sorted(value)))
    return _encode_any(value)


def _encode_action(value: Any) -> Any:
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
    return _encode_any(value)


def _encode_field(value: Any) -> Any:
    if isinstance(value, tuple):
        if type(value) is tuple:
            return list(value)
        kind = type(value)
        return msgpack.ExtType(_NAMED_TUPLE, _plain_packer.pack([kind.__module__, kind.__qualname__, list(value)]))
    return _encode_any(value)


def _encode_any(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} can not be recorded")


def _packer(default: Callable[[Any], Any], strict_types: bool = False) -> msgpack.Packer:
    return msgpack.Packer(default=default, strict_types=strict_types, use_bin_type=True, autoreset=True)


_plain_packer = _packer(_encode_any)
_field_packer = _packer(_encode_field, strict_types=True)  # preserves named tuples
_event_packer = _packer(_encode_event)
_action_packer = _packer(_encode_action)


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
    raise ValueError(f"unknown msgpack extension {code}")


def _request(fields: list[Any]) -> QueuedRequest:
    request = QueuedRequest()
    for name, value in zip((*REQUEST_FIELDS, "body"), fields, strict=True):
        setattr(request, name, value)
    request.body = zeros(fields[-1])
    request.frame = NO_FRAME
    return request

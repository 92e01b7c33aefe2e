"""Who owns a queue of live requests: the record that says so, and word of it."""

from __future__ import annotations

import re
from typing import NamedTuple

from schemas.wire import WIRE_VERSION, MalformedMessage, pack, text, unpack

_is_name = re.compile(r"[A-Za-z0-9_=-]{0,256}", re.ASCII).fullmatch

MAX_EPOCH = 10**15
"""Milliseconds of 30,000 years. nats-server takes 16 characters as a group's name, which an epoch is."""


class QueueOwner(NamedTuple):
    """The queue `partition` of `model` is `owner`'s ("": nobody's), from `epoch` on.

    Epochs of a queue only grow. Whoever has seen one takes nothing more from owners of lower ones.
    """

    model: str
    partition: int
    owner: str
    epoch: int


def pack_queue_owner(owner: QueueOwner) -> bytes:
    """The record, which is also the message that tells of it."""
    return bytes(pack((WIRE_VERSION, *owner)))


def unpack_queue_owner(data: bytes) -> QueueOwner:
    """The record in a message. Raises MalformedMessage."""
    model, partition, owner, epoch = unpack(data, 4)
    if not (type(partition) is type(epoch) is int and partition >= 0 and 0 <= epoch < MAX_EPOCH):
        raise MalformedMessage("not the owner of a queue: expected integers")
    if type(owner) is not str or not _is_name(owner):
        raise MalformedMessage("not the owner of a queue: no name")
    return QueueOwner(text(model), partition, owner, epoch)

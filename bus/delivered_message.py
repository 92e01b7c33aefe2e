"""What the subject by which a message of JetStream is acknowledged tells of its delivery.

Source: JetStream's acknowledgement subjects: `$JS.ACK.<stream>.<consumer>.<delivered>.<stream sequence>.<consumer
sequence>.<timestamp>.<pending>`, with domain and account ahead of the stream in the newer form.
"""

from __future__ import annotations

from typing import NamedTuple

_OLD_LENGTH = 9
_NEW_LENGTH = 11


class Delivery(NamedTuple):
    """Which message it is, when it was stored, how often it has been delivered, and how many are still to come."""

    deliveries: int
    sequence: int
    stored_ns: int
    pending: int


def delivery_of(ack_subject: str) -> Delivery | None:
    """What `ack_subject` tells; None where it is no acknowledgement's subject."""
    tokens = ack_subject.split(".")
    if len(tokens) == _OLD_LENGTH:
        first = 4
    elif len(tokens) >= _NEW_LENGTH:
        first = 6
    else:
        return None
    try:
        return Delivery(int(tokens[first]), int(tokens[first + 1]), int(tokens[first + 3]), int(tokens[first + 4]))
    except ValueError:
        return None

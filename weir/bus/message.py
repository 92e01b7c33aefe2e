"""`Message`: what callbacks of subscriptions get, from nats-server or through a link."""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class Message(msgspec.Struct, frozen=True, gc=False):
    """A received message. `status` is set in a response of nats-server itself ("503": no subscriber).

    `header_block` holds the encoded headers, b"" without any; `weir.bus.nats.headers` decodes them. Bytes of `subject` and
    `reply` that are not UTF-8 are U+FFFD here: `weir.bus.naming.reserved_subjects.subject_problem` rejects such a
    subject, and nothing may be published on it.
    """

    subject: str
    reply: str
    data: bytes
    status: str
    header_block: bytes = b""


Callback = Callable[[Message], None]

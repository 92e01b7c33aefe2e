"""`StrayMessages`: durable requests on subjects that name a model in other letters than `bus.subjects.token` writes.

`event.my=2emodel` and `event.größe` are subjects that stream QUEUE takes, but no model's: what lies there is moved to
the model's own. A death in between has a request there twice, which is found out by its id: it has one record.

A subject whose bytes are not UTF-8 is shown with U+FFFD in their place, and can't be asked for. Its message is searched for
among those on similar subjects, and then moved as if the model's name had U+FFFD in it: no model has such a name, so the
request ends as a dead letter.
"""

from __future__ import annotations

from collections.abc import Iterable

from nats.errors import Error as NatsError

from bus import durable_subjects as subjects
from bus.acked_publisher import AckedPublisher
from bus.headers import pack_headers
from bus.jetstream_api import JetStreamApi
from bus.stored_messages import StoredMessage
from gateway.durable.dead_letters import original_lines
from gateway.durable.request_terms import ID, REPLAYED_ID
from runtime.containment import contained

NOT_UTF8 = "\ufffd"

_MAX_LOOKS = 1000
"""Messages looked at in one call of `move` in search of one on a subject that is not UTF-8; the next call goes on there."""


class StrayMessages:
    """See the module."""

    def __init__(self, api: JetStreamApi, publisher: AckedPublisher) -> None:
        self._api = api
        self._publisher = publisher
        self._searched: dict[str, int] = {}  # by subject: the sequence at which the search goes on

    async def move(self, strays: Iterable[str]) -> bool:
        """Moves what lies on these subjects; False where some is left: there was no room for it, or the search goes on.

        Raises NatsError, OSError or TimeoutError while the broker is away.
        """
        moved = [await self._move(subject) for subject in strays]
        return all(moved)

    @contained(passes=(NatsError, OSError, TimeoutError))
    async def _move(self, subject: str) -> bool:
        while (found := await self._find(subject)) is not None:
            ack = await self._publisher.store(subjects.canonical(subject), found.data, _block(found))
            if not ack.is_stored and not ack.is_duplicate:
                return False
            await self._api.delete(subjects.QUEUE_STREAM, found.sequence)
        return subject not in self._searched

    async def _find(self, subject: str) -> StoredMessage | None:
        """The oldest message on `subject`, or on one whose bytes that are not UTF-8 are shown as in `subject`."""
        found = await self._api.first(subjects.QUEUE_STREAM, subject)
        if found is not None or NOT_UTF8 not in subject:
            return found
        similar = ".".join("*" if NOT_UTF8 in token else token for token in subject.split("."))
        sequence = self._searched.get(subject, 1)
        for _ in range(_MAX_LOOKS):
            found = await self._api.first(subjects.QUEUE_STREAM, similar, sequence)
            if found is None:
                self._searched.pop(subject, None)
                return None
            self._searched[subject] = sequence = found.sequence
            if found.subject == subject:
                return found
            sequence += 1
        self._searched[subject] = sequence
        return None


def _block(found: StoredMessage) -> bytes:
    told = [("Nats-Msg-Id", f"stray-{found.sequence}")]
    id = found.headers.get(ID, "")
    if id and REPLAYED_ID not in found.headers:
        told.append(("Weir-Id", id))
    return pack_headers(told)[:-2] + original_lines(found.header_block)

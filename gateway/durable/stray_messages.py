"""`StrayMessages`: durable requests on subjects that name a model in other letters than `bus.subjects.token` writes.

`event.my=2emodel` and `event.größe` are subjects that stream QUEUE takes, but no model's: what lies there is moved to
the model's own. A death in between has a request there twice, which is found out by its id: it has one record.
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


class StrayMessages:
    """See the module."""

    def __init__(self, api: JetStreamApi, publisher: AckedPublisher) -> None:
        self._api = api
        self._publisher = publisher

    async def move(self, strays: Iterable[str]) -> bool:
        """Moves what lies on these subjects; False where there was no room for all of it.

        Raises NatsError, OSError or TimeoutError while the broker is away.
        """
        moved = [await self._move(subject) for subject in strays]
        return all(moved)

    @contained(passes=(NatsError, OSError, TimeoutError))
    async def _move(self, subject: str) -> bool:
        while (found := await self._api.first(subjects.QUEUE_STREAM, subject)) is not None:
            ack = await self._publisher.store(subjects.canonical(subject), found.data, _block(found))
            if not ack.is_stored and not ack.is_duplicate:
                return False
            await self._api.delete(subjects.QUEUE_STREAM, found.sequence)
        return True


def _block(found: StoredMessage) -> bytes:
    told = [("Nats-Msg-Id", f"stray-{found.sequence}")]
    id = found.headers.get(ID, "")
    if id and REPLAYED_ID not in found.headers:
        told.append(("Weir-Id", id))
    return pack_headers(told)[:-2] + original_lines(found.header_block)

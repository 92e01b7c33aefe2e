"""`Links`: the links of one process to others on its host.

A worker listens, and publishes its address in its record in the registry. Gateways, schedulers and other callers connect
when they read the record, which takes no time on a host: no message to the worker precedes the link. The one that
connects announces on which subjects it takes messages. From then on messages of either side for the other one's subjects
go through the link; without a link, or after its end, they go through nats-server.

Messages and their subjects are the same either way, and so are the callbacks that receive them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from weir.bus.links import folder
from weir.bus.links.framing import MalformedFrame, Outgoing, pack_subjects, unpack_subjects
from weir.bus.links.link import Frames, Link, LinkEnd, Sent
from weir.bus.message import Callback, Message
from weir.bus.turn import Turn
from weir.runtime.containment import call_each, report

logger = logging.getLogger("weir.bus")

MAX_LINKS = 4096
"""Links that a process accepts."""

MAX_SUBJECTS = 64
"""Subjects that the process at the other end of a link may announce."""

_OPEN_SUBJECTS = ("reply.", "done.")
"""Beginnings of the subjects that a process may announce: those of callers and of schedulers."""

ACCEPTED_STALL_LIMIT_S = 0.5
"""How long a caller may read nothing before its responses go through nats-server: others wait for the same instance."""

OPENED_STALL_LIMIT_S = 5.0
"""How long a worker may read nothing; it then counts as lost, as one without heartbeats."""

REOPEN_INTERVAL_S = 0.1
"""A link that ends sooner after it was opened is opened again only after this time: the worker may reject each."""

LostLink = Callable[[str, LinkEnd], None]
"""Called with the name of the process whose link has ended, and how."""


class _Opened(NamedTuple):
    """A link that this process has opened, with the arguments of `Links.connect`."""

    link: Link
    address: str
    subjects: tuple[str, ...]
    opened_s: float


class Links:
    """The links of one process. Everything but `route` and sending on what it returns runs in the event loop.

    `publish` sends a message through nats-server where there is no link.
    """

    def __init__(self, publish: Callable[[str, bytes], None], turn: Turn) -> None:
        self._publish_one = publish
        self._turn = turn
        self._own: dict[str, Callback] = {}  # by the subjects on which this process takes messages
        self._routes: dict[str, Link] = {}
        self.route = self._routes.get
        """Returns the link for messages on a subject, None if they go through nats-server. Callable in any thread."""
        self._on_frames = partial(turn.run, self._receive)
        self._links: dict[str, _Opened] = {}  # by peer
        self._accepted: set[Link] = set()
        self._listener: socket.socket | None = None
        self.address = ""
        self._due: dict[Link, list[Outgoing]] = {}
        self._lost_listeners: list[LostLink] = []
        self._is_closed = False
        self.send_unsent: Callable[[Sequence[Outgoing]], None] = self._publish
        """Sends what a lost link has not sent another way: the process may still read from nats-server. A process that
        sends from threads replaces it, so that these messages and later ones keep their order."""
        self.received = 0
        """Messages that came through links."""

    # Opening

    def listen(self) -> None:
        """Listens for links at `address`. Without a place for its socket, the process does without links."""
        try:
            self._listener, self.address = folder.listen()
        except OSError as error:
            logger.warning("no links to processes of this host, messages go through nats-server: %s", error)
            return
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self.accept_waiting)

    def take(self, subject: str, callback: Callback) -> None:
        """Calls `callback` with messages on `subject` that come through links. The bus has a subscription to it."""
        self._own[subject] = callback
        for opened in self._links.values():
            self._announce(opened.link)

    def connect(self, peer: str, address: str, subjects: Iterable[str]) -> None:
        """Connects to the process `peer`, which listens at `address` and takes messages on `subjects`.

        Does nothing where there is that link, or where this process takes no messages through links.
        """
        known = self._links.get(peer)
        if not self._own or self._is_closed or (known is not None and known.address == address):
            return
        if known is not None:
            known.link.close()
        try:
            self._open(peer, address, tuple(subjects))
        except OSError as error:
            logger.debug("no link to %s: %s", peer, error)

    def _open(self, peer: str, address: str, subjects: tuple[str, ...]) -> None:
        """Opens a link. Raises OSError."""
        connection = folder.connect(address)
        link = Link(peer, connection, self._on_frames, partial(self._on_opened_end, peer), OPENED_STALL_LIMIT_S)
        self._links[peer] = _Opened(link, address, subjects, time.monotonic())
        self._announce(link)
        for subject in subjects:
            self._routes[subject] = link

    def has_link(self, peer: str) -> bool:
        """Whether this process has opened a link to `peer`."""
        return peer in self._links

    def on_lost(self, listener: LostLink) -> None:
        """Calls `listener` after the end of a link that this process has opened."""
        self._lost_listeners.append(listener)

    def accept_waiting(self) -> None:
        """Accepts the links that others have opened, and reads what they announce.

        A process calls it before it sends a message to one that has no link yet: that one may just have opened it.
        """
        while self._listener is not None:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                logger.error("no link accepted, messages go through nats-server: %s", error)
                return
            connection.setblocking(False)
            try:
                folder.check_user(connection)
                if len(self._accepted) >= MAX_LINKS:
                    raise OSError(f"there are {MAX_LINKS} links")
            except OSError as error:
                logger.warning("rejected a link: %s", error)
                connection.close()
                continue
            link = Link("a caller", connection, self._on_frames, self._on_accepted_end, ACCEPTED_STALL_LIMIT_S)
            self._accepted.add(link)
            link.read_waiting()

    def close(self) -> None:
        """Closes all links in good order."""
        self._is_closed = True
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            folder.remove(self.address)
        self._flush()
        for link in (*self._accepted, *(opened.link for opened in self._links.values())):
            link.close()

    # Messages

    def send(self, subject: str, data: bytes) -> bool:
        """Sends a message within this turn of the event loop; False if there is no link for it."""
        link = self._routes.get(subject)
        if link is None:
            return False
        if not self._due:
            self._turn.at_write(self._flush)
        messages = self._due.get(link)
        if messages is None:
            self._due[link] = [(subject, data)]
        else:
            messages.append((subject, data))
        return True

    def _flush(self) -> None:
        due, self._due = self._due, {}
        for link, messages in due.items():
            if link.send(messages) is Sent.REJECTED:
                self._publish(messages)

    def _announce(self, link: Link) -> None:
        link.send([("", pack_subjects(self._own))])

    def _receive(self, link: Link, frames: Frames) -> None:
        for subject, data in frames:
            if subject:
                name = subject.decode("utf-8", "replace")
                callback = self._own.get(name)
                if callback is not None:
                    self.received += 1
                    try:
                        callback(Message(name, "", data, ""))
                    except Exception as error:  # noqa: BLE001 - contained: an exception affects one message only
                        report("weir.bus.links: dispatching a message", error)
            elif data:
                self._on_announcement(link, data)

    def _on_announcement(self, link: Link, data: bytes) -> None:
        try:
            subjects = unpack_subjects(data)
        except MalformedFrame as error:
            logger.warning("link: ignored %s", error)
            return
        for subject in subjects[:MAX_SUBJECTS]:
            if subject.startswith(_OPEN_SUBJECTS):
                former = self._routes.get(subject)
                self._routes[subject] = link
                if former is not None and former is not link:
                    former.read_waiting()  # it was sent before what follows here
                link.name = subject.partition(".")[2]

    # Ends

    def _on_accepted_end(self, link: Link, _end: LinkEnd) -> None:
        self._accepted.discard(link)
        self._remove(link)
        while unsent := link.take_unsent():
            self.send_unsent(unsent)

    def _on_opened_end(self, peer: str, link: Link, end: LinkEnd) -> None:
        opened = self._links.get(peer)
        self._remove(link)
        if opened is not None and opened.link is link:
            del self._links[peer]
            if end is LinkEnd.LOST and not self._is_closed and self._still_listens(peer, opened):
                end = LinkEnd.CUT
        while unsent := link.take_unsent():
            if end is not LinkEnd.CUT:
                # Batches are not sent again here: their scheduler does that, because it treats the worker as lost.
                unsent = [message for message in unsent if not message[0].startswith("work.")]
            self.send_unsent(unsent)
        if not self._is_closed:
            call_each("weir.bus.links: a listener for lost links", self._lost_listeners, peer, end)

    def _still_listens(self, peer: str, opened: _Opened) -> bool:
        """Opens a link again that has ended; returns False if the process does not listen any more, so that it is dead.

        If it is just dying, the new link ends, too. A link that ended soon is opened again later.
        """
        try:
            if time.monotonic() - opened.opened_s < REOPEN_INTERVAL_S:
                folder.connect(opened.address).close()
                loop = asyncio.get_running_loop()
                loop.call_later(REOPEN_INTERVAL_S, self.connect, peer, opened.address, opened.subjects)
            else:
                self._open(peer, opened.address, opened.subjects)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError as error:
            logger.debug("no link to %s: %s", peer, error)
        return True

    def _remove(self, link: Link) -> None:
        for subject in [subject for subject, of in self._routes.items() if of is link]:
            del self._routes[subject]

    def _publish(self, messages: Iterable[Outgoing]) -> None:
        for subject, data in messages:
            self._publish_one(subject, data)

"""Links between hosts: the same frames over TCP, behind a handshake, encrypted where the broker is.

`TcpListener` accepts links, `open_link` opens one. Both ends must prove that they know the listener's secret
(`weir.bus.links.handshake`) before any other frame counts. An end that does not in time is disconnected, and so is one that
sends malformed frames or reads nothing. With TLS both ends present certificates of the same authority. Names in them are
not checked, because processes have changing addresses: the opening end accepts one certificate alone, whose fingerprint it
has from the broker.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
from collections.abc import Callable

from weir.bus.links.framing import MAX_SUBJECT_BYTES, Place
from weir.bus.links.handshake import Handshake, HandshakeError, new_secret
from weir.bus.links.link import Frames, LinkEnd
from weir.bus.links.tcp_link import TcpLink
from weir.schemas.core.names import ListenAddress
from weir.schemas.wire.transfers import OwnerAddress

logger = logging.getLogger("weir.bus")

MAX_TCP_LINKS = 1024
"""Links that other hosts may have to one process."""

MAX_UNPROVEN = 64
"""Those that have not completed the handshake."""

HANDSHAKE_TIMEOUT_S = 3.0
"""How long the other end may take for the handshake."""

TCP_STALL_LIMIT_S = 20.0
"""How long the other end may take to receive a piece."""

IDLE_LIMIT_S = 300.0
"""A link without a frame for this time is closed: the end that has opened it would have closed it before."""

CONNECT_TIMEOUT_S = 3.0
"""How long opening a link may take, with the handshake."""

MAX_REQUEST_FRAME_BYTES = 1024
"""The largest frame of a handshake, and the largest that a listener accepts: requests are small."""

_CHECK_EVERY_S = 1.0

OnFrames = Callable[[TcpLink, Frames], None]
OnEnd = Callable[[TcpLink, LinkEnd], None]


class TcpListener:
    """Accepts links at `where`. `context` encrypts them; `certificate` renews it and returns its fingerprint.

    `on_frames` and `on_end` are to be set before a link is accepted. Everything runs in the event loop.
    """

    def __init__(
        self,
        where: ListenAddress,
        context: ssl.SSLContext | None = None,
        certificate: Callable[[], bytes] = lambda: b"",
    ) -> None:
        self._where = where
        self._context = context
        self._certificate = certificate
        self._secret = new_secret()
        self._server: asyncio.Server | None = None
        self._accepted: dict[TcpLink, _Accepted] = {}
        self._check: asyncio.TimerHandle | None = None
        self.on_frames: OnFrames = lambda _link, _frames: None
        self.on_end: OnEnd = lambda _link, _end: None
        self.port = 0
        self.refused = 0
        """Links that were rejected, or that did not complete the handshake."""

    async def start(self) -> None:
        """Listens. Raises OSError."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: _AcceptedLink(self),
                self._where.host,
                self._where.port,
                ssl=self._context,
                backlog=MAX_UNPROVEN,
                ssl_handshake_timeout=None if self._context is None else HANDSHAKE_TIMEOUT_S,
            )
        except OSError as error:
            raise OSError(f"--payload-listen={self._where.host}:{self._where.port}: {error}") from error
        self.port = self._server.sockets[0].getsockname()[1]
        self._check = loop.call_later(_CHECK_EVERY_S, self._disconnect_idle)

    def address(self, local_host: str) -> OwnerAddress:
        """Returns the address for `open_link`, with `local_host` if the option names no host; an empty one if this
        process does not listen.
        """
        host = local_host if self._where.is_any else self._where.host
        if self._server is None or not host:
            return OwnerAddress()
        try:
            return OwnerAddress(host, self.port, self._secret, self._certificate())
        except (OSError, ValueError) as error:
            logger.error("--nats-cert can't be used for links between hosts: %s", error)
            return OwnerAddress()

    def close(self) -> None:
        """Closes all links, and accepts no more."""
        if self._check is not None:
            self._check.cancel()
        if self._server is not None:
            self._server.close()
            self._server = None
        for link in list(self._accepted):
            link.close()

    def admit(self, link: TcpLink) -> bool:
        """Takes a new link, unless there are too many."""
        unproven = sum(not other.handshake.is_proven for other in self._accepted.values())
        if self._server is None or len(self._accepted) >= MAX_TCP_LINKS or unproven >= MAX_UNPROVEN:
            self.refused += 1
            return False
        self._accepted[link] = _Accepted(Handshake(self._secret, is_opening=False), asyncio.get_running_loop().time())
        return True

    def receive(self, link: TcpLink, frames: Frames) -> None:
        """Takes the frames of the handshake of a link."""
        if _advance(link, self._accepted[link].handshake, frames):
            link.on_frames = self.on_frames
            if frames:
                self.on_frames(link, frames)

    def end(self, link: TcpLink, end: LinkEnd) -> None:
        """A link has ended."""
        accepted = self._accepted.pop(link, None)
        if accepted is not None:
            self.refused += not accepted.handshake.is_proven
            self.on_end(link, end)

    def _disconnect_idle(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for link in [link for link, accepted in self._accepted.items() if accepted.is_overdue(link, now_s)]:
            link.break_off()
        self._check = loop.call_later(_CHECK_EVERY_S, self._disconnect_idle)


class _AcceptedLink(TcpLink):
    """A link that another host has opened."""

    def __init__(self, listener: TcpListener) -> None:
        super().__init__("a reader", listener.receive, listener.end, MAX_REQUEST_FRAME_BYTES)
        self._listener = listener

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        host, port, *_ = transport.get_extra_info("peername")
        self.name = f"{host}, port {port}"
        if not self._listener.admit(self):
            self.break_off()


class _Accepted:
    """A link that was accepted."""

    def __init__(self, handshake: Handshake, now_s: float) -> None:
        self.handshake = handshake
        self._since_s = now_s
        self._activity = 0, 0  # bytes read and pieces written until then

    def is_overdue(self, link: TcpLink, now_s: float) -> bool:
        """Whether the handshake takes too long, the other end reads nothing, or the link has been idle for too long."""
        if not self.handshake.is_proven:
            return now_s - self._since_s >= HANDSHAKE_TIMEOUT_S
        activity = link.read_bytes, link.written_pieces
        if activity != self._activity:
            self._activity, self._since_s = activity, now_s
        return now_s - self._since_s >= (TCP_STALL_LIMIT_S if link.is_writing else IDLE_LIMIT_S)


async def open_link(  # noqa: PLR0913 - the two ends of a link, and how it reads
    peer: str,
    address: OwnerAddress,
    context: ssl.SSLContext | None,
    on_frames: OnFrames,
    on_end: OnEnd,
    place: Place,
    max_data_bytes: int,
) -> TcpLink:
    """Returns a link to the process `peer`, which listens at `address`. `context` encrypts it.

    Raises OSError, TimeoutError after CONNECT_TIMEOUT_S, and HandshakeError. `on_end` is called for a link that was
    returned, and only then.
    """
    loop = asyncio.get_running_loop()
    handshake, proven = Handshake(address.secret, is_opening=True), loop.create_future()

    def receive(link: TcpLink, frames: Frames) -> None:
        if _advance(link, handshake, frames) and not proven.done():
            proven.set_result(None)

    def end(_link: TcpLink, _end: LinkEnd) -> None:
        if not proven.done():
            proven.set_exception(HandshakeError("the other end has closed the link, or does not prove who it is"))
            proven.exception()  # it may be of no interest any more

    link = TcpLink(peer, receive, end, MAX_REQUEST_FRAME_BYTES, place)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            transport, _ = await loop.create_connection(
                lambda: link,
                address.host,
                address.port,
                ssl=context,
                server_hostname=None if context is None else address.host,
            )
            if context is not None:
                secured = transport.get_extra_info("ssl_object")
                if fingerprint(secured.getpeercert(binary_form=True) or b"") != address.certificate:
                    raise OSError("its certificate is not the one that it announced")
            link.send([("", handshake.begin())])
            await proven
            if link.has_ended:
                raise HandshakeError("the other end has closed the link")
    except BaseException:
        link.break_off()
        raise
    link.limit_frames(max_data_bytes + MAX_SUBJECT_BYTES + 1)
    link.on_frames, link.on_end = on_frames, on_end
    return link


def _advance(link: TcpLink, handshake: Handshake, frames: Frames) -> bool:
    """Removes the frames of the handshake from `frames`; returns whether it is complete. Breaks a wrong one off."""
    while frames and not handshake.is_proven:
        subject, data = frames.pop(0)
        try:
            response = handshake.receive(b"" if subject else data)
        except HandshakeError as error:
            logger.info("link to %s: %s", link.name, error)
            link.break_off()
            return False
        if response:
            link.send([("", response)])
    return handshake.is_proven


def fingerprint(certificate: bytes) -> bytes:
    """Returns the fingerprint of a certificate in DER."""
    return hashlib.sha256(certificate).digest()

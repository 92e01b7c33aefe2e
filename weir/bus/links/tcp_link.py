"""`TcpLink`: one link between two hosts. Everything runs in the event loop, whose transport reads, writes and encrypts.

A `Link` between processes of a host is written to by threads; this one is not, and carries content of shared memory
(`send_content`), which leaves and arrives without a copy in the processes. Content is sent one piece at a time, so a
message waits for one piece at most.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

from weir.bus.links.framing import FrameReader, MalformedFrame, Outgoing, Place, pack_frames, pack_header
from weir.bus.links.link import ENDING, Frames, LinkEnd

logger = logging.getLogger("weir.bus")

_READ_BYTES = 4096  # what is read of content with its header is copied


class TcpLink(asyncio.BufferedProtocol):
    """The protocol of one connection. The owner's callbacks may be replaced at any time.

    `on_frames` is called with the frames that have arrived, and may raise MalformedFrame; `on_end` once when the connection
    has ended. `place` provides buffers for the data of frames that arrive in several parts, which are not passed to
    `on_frames`. Frames of more than `max_frame_bytes` end the connection.
    """

    def __init__(
        self,
        name: str,
        on_frames: Callable[[TcpLink, Frames], None],
        on_end: Callable[[TcpLink, LinkEnd], None],
        max_frame_bytes: int,
        place: Place | None = None,
    ) -> None:
        self.name = name
        self.on_frames = on_frames
        self.on_end = on_end
        self.read_bytes = 0
        self.written_pieces = 0
        self.has_ended = False
        self.transport: asyncio.Transport | None = None
        self._reader = FrameReader(max_frame_bytes)
        self._place = place
        self._spare = memoryview(bytearray(_READ_BYTES))
        self._then: Callable[[], Outgoing] | None = None  # called when the content is written
        self._is_paused = False
        self._peer_ends = False

    @property
    def is_writing(self) -> bool:
        """Whether content was not written completely."""
        return self._then is not None

    def limit_frames(self, max_frame_bytes: int) -> None:
        """Sets the size from which on frames are malformed."""
        self._reader.max_frame_bytes = max_frame_bytes

    def send(self, messages: Sequence[Outgoing]) -> None:
        """Sends the messages in order; they are lost if the connection has ended, or ends before they are written."""
        if self.transport is not None and not self.has_ended:
            self.transport.write(self._packed(messages))

    def send_content(self, subject: bytes, content: memoryview, then: Callable[[], Outgoing]) -> None:
        """Sends a message whose data is `content`, and then the message that `then` returns.

        `then` is called once the kernel has the content, which may have changed until then. The next content may be sent
        after that.
        """
        if self.transport is None or self.has_ended:
            return
        self._then = then
        self.transport.writelines((pack_header(subject, len(content)), content))
        if not self._is_paused:
            self._on_written()

    def close(self) -> None:
        """Announces the end of this process and ends the connection."""
        if self.transport is not None and not self.has_ended:
            self.send([ENDING])
            self.transport.close()
            self._end(LinkEnd.ORDERLY)

    def break_off(self) -> None:
        """Ends the connection, without reading what the peer has sent."""
        self._end(LinkEnd.BROKEN_OFF)
        if self.transport is not None:
            self.transport.abort()

    def _packed(self, messages: Sequence[Outgoing]) -> bytes:
        return pack_frames(messages)

    def _on_written(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            self.written_pieces += 1
            self.send([then()])

    def _end(self, end: LinkEnd) -> None:
        if not self.has_ended:
            self.has_ended, self._then = True, None
            self.on_end(self, end)

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is established."""
        self.transport = transport  # type: ignore[assignment]
        # `resume_writing` is called when the last byte was written, not sooner.
        self.transport.set_write_buffer_limits(high=1, low=0)  # type: ignore[union-attr]
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that is down closes no connection

    def pause_writing(self) -> None:
        """Not everything was written."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """Everything was written."""
        self._is_paused = False
        self._on_written()

    def get_buffer(self, _size: int) -> memoryview:
        """Returns where the next bytes are put."""
        return self._spare if self._reader.target is None else self._reader.target

    def buffer_updated(self, count: int) -> None:
        """Takes the first `count` bytes that were put there."""
        if self.has_ended:
            return
        self.read_bytes += count
        if self._reader.target is not None:
            self._reader.fill(count)
            return
        try:
            frames = self._reader.feed(bytes(self._spare[:count]))
            if frames:
                self._peer_ends = self._peer_ends or frames[-1] == (b"", b"")
                self.on_frames(self, frames)
            if self._place is not None and not self.has_ended:
                self._reader.begin_placing(self._place)
        except MalformedFrame as error:
            logger.error("link to %s: closing it, because the process does not send frames: %s", self.name, error)
            self.break_off()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection has ended."""
        if error is not None:
            logger.debug("link to %s: %s", self.name, error)
        self._end(LinkEnd.ORDERLY if self._peer_ends else LinkEnd.LOST)

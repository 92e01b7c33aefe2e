"""An end of a link between hosts that a test controls frame by frame."""

from __future__ import annotations

import asyncio

from weir.bus.links.framing import FrameReader, pack_frames
from weir.bus.links.handshake import Handshake
from weir.schemas.wire.transfers import OwnerAddress


class RawEnd:
    """One end: sends and reads single frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self._frames = FrameReader()
        self._read: list[tuple[bytes, bytes]] = []

    def send(self, subject: str, data: bytes) -> None:
        self.writer.write(pack_frames([(subject, data)]))

    async def frame(self) -> tuple[str, bytes]:
        """The next frame. Raises ConnectionError if the other end has closed the link."""
        while not self._read:
            data = await asyncio.wait_for(self._reader.read(1 << 20), 10)
            if not data:
                raise ConnectionError("the other end has closed the link")
            self._read += self._frames.feed(data)
        subject, data = self._read.pop(0)
        return subject.decode(), data

    async def is_closed(self) -> bool:
        """Waits for the end of the connection, and closes this end too; false if there is a frame before."""
        try:
            await self.frame()
        except (ConnectionError, asyncio.IncompleteReadError):
            self.writer.close()  # before Python 3.11.4 nothing closes a writer that is forgotten
            return True
        return False

    async def prove(self, secret: bytes, is_opening: bool) -> None:
        """Completes the handshake."""
        handshake = Handshake(secret, is_opening)
        if is_opening:
            self.send("", handshake.begin())
        while not handshake.is_proven:
            _, data = await self.frame()
            response = handshake.receive(data)
            if response:
                self.send("", response)


async def dial(port: int) -> RawEnd:
    """Connects to a listener."""
    return RawEnd(*await asyncio.open_connection("127.0.0.1", port))


async def proven(address: OwnerAddress) -> RawEnd:
    """Opens a link to a listener."""
    end = await dial(address.port)
    await end.prove(address.secret, is_opening=True)
    return end

"""`HttpCaller`: one connection over which one request after the other is sent, by hand: so what comes unasked is seen."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from weir.options.api_key import authorization

_LARGEST = 64 << 20


class Answer(NamedTuple):
    """Status, headers in lower case, and body."""

    status: int
    headers: dict[str, str]
    body: bytes


class HttpCaller:
    """One HTTP connection for one request after another. `unasked` counts unsolicited bytes: a duplicated response.

    Each request has the headers `shown`: those that show the key in WEIR_API_KEY, where nothing else is given.
    """

    def __init__(self, address: tuple[str, int], shown: Mapping[str, str] | None = None) -> None:
        self.address = address
        self._shown = authorization("") if shown is None else shown
        self.unasked = 0
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(
        self, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None, method: str = "POST"
    ) -> Answer:
        """The answer. Raises OSError or asyncio.IncompleteReadError when the connection ends without one."""
        try:
            return await self._ask(path, body, {**self._shown, **(headers or {})}, method)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the connection, after a look at what came unasked."""
        self._look()
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def _ask(self, path: str, body: bytes, headers: Mapping[str, str], method: str) -> Answer:
        if self._writer is None or self._reader is None or self._reader.at_eof() or self._writer.is_closing():
            self.close()
            self._reader, self._writer = await asyncio.open_connection(*self.address, limit=_LARGEST)
        self._look()
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.address[0]}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        reply = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        if reply.get("transfer-encoding") == "chunked":
            content = b""
            while size := int((await self._reader.readline()).strip() or b"0", 16):
                content += await self._reader.readexactly(size)
                await self._reader.readline()
            await self._reader.readline()
        else:
            content = await self._reader.readexactly(int(reply.get("content-length", 0)))
        if reply.get("connection") == "close":
            self.close()
        return Answer(int(head[0].split()[1]), reply, content)

    def _look(self) -> None:
        if self._reader is not None:
            self.unasked += len(self._reader._buffer)  # type: ignore[attr-defined]

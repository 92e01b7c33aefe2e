"""`TlsSocket`: an encrypted connection that threads write to while the event loop reads it.

Python's own `SSLSocket` lets one thread at a time use a connection, reading or writing, and does not hold itself to that.
Here what is encrypted and what is sent are two steps, and whoever takes either holds the owner's lock.
Source: `ssl.MemoryBIO`, `ssl.SSLContext.wrap_bio`.
"""

from __future__ import annotations

import socket
import ssl

_READ_BYTES = 16384


class TlsSocket:
    """As much of a socket as a `ThreadPublisher` needs. The owner lets in one thread at a time.

    Raises ssl.SSLError or OSError when there is no such connection to be had.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, hostname: str) -> None:
        self._socket = connection
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=hostname)
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._fill(0)
        self._flush()

    def sendall(self, data: bytes) -> None:
        """As of a socket."""
        self._tls.write(data)
        self._flush()

    def recv(self, size: int, flags: int = 0) -> bytes:
        """As of a socket: with MSG_DONTWAIT raises BlockingIOError where nothing has come that can be read."""
        has_read = False
        while True:
            try:
                data = self._tls.read(size)
                self._flush()
                return data
            except ssl.SSLWantReadError as error:
                # What has come may be less than can be decrypted; and a socket with a timeout waits in spite of the flag.
                if has_read and flags & socket.MSG_DONTWAIT:
                    raise BlockingIOError from error
                self._fill(flags)
                has_read = True
            except ssl.SSLZeroReturnError:
                return b""

    def fileno(self) -> int:
        """As of a socket."""
        return self._socket.fileno()

    def shutdown(self, how: int) -> None:
        """As of a socket."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """As of a socket."""
        self._socket.close()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._socket.sendall(self._outgoing.read())

    def _fill(self, flags: int) -> None:
        data = self._socket.recv(_READ_BYTES, flags)
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

"""`MetricsProtocol`: uvicorn's HTTP protocol with bounded requests, for the port that is only scraped."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_REQUEST_BYTES = 64 * 1024
"""Of one request, head and body. A scraper sends some hundred bytes; the parser itself would keep an endless header."""


class MetricsProtocol(HttpToolsProtocol):
    """One connection. A request that is longer than `MAX_REQUEST_BYTES` ends it."""

    _request_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Parses what arrived; a request of more than `MAX_REQUEST_BYTES` ends its connection."""
        self._request_bytes += len(data)
        if self._request_bytes > MAX_REQUEST_BYTES:
            self.transport.abort()
            return
        super().data_received(data)

    def on_message_complete(self) -> None:
        """The next request is counted anew."""
        self._request_bytes = 0
        super().on_message_complete()

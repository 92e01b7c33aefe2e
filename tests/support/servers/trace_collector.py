"""`Collector`: a small OTLP collector over HTTP that keeps the traces it receives."""

from __future__ import annotations

import http.server
import threading
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.waiting import wait_until


class Collector:
    """Listens on a free port; `url` is where spans are to be sent."""

    def __init__(self) -> None:
        self.resources: list[dict[str, str]] = []
        self.headers: dict[str, str] = {}
        self._spans: list[Any] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.headers = {name.lower(): value for name, value in self.headers.items()}
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.receive(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def receive(self, request: Any) -> None:
        """Keeps what one export brought."""
        for resource_spans in request.resource_spans:
            self.resources.append({a.key: a.value.string_value for a in resource_spans.resource.attributes})
            for scope_spans in resource_spans.scope_spans:
                self._spans += scope_spans.spans

    def trace(self, trace_id: str) -> dict[str, Any]:
        """The spans of one trace by their names, once it is complete."""

        def find() -> dict[str, Any]:
            found = {span.name: span for span in list(self._spans) if span.trace_id.hex() == trace_id}
            return found if "compute" in found else {}

        return dict(wait_until(find))

    def trace_ids(self) -> set[str]:
        """The traces of which there is a span."""
        return {span.trace_id.hex() for span in list(self._spans)}

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

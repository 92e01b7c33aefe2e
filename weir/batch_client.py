"""`JobsClient`: what `weir batch` asks a gateway, over HTTP."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import quote, urlsplit

from weir.start_error import StartError


class Unreachable(Exception):
    """Nobody answers there just now, which may pass. The message says why."""


class JobsClient:
    """The offline jobs of the server at `url` ("host:port", or with http:// or https:// before it).

    `hint` is what to say as well where nobody answers there. A request may take `timeout_s`.
    """

    timeout_s = 30.0

    def __init__(self, url: str, hint: str = "") -> None:
        self.hint = hint
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StartError(f"--url must be host:port, not '{url}'")
        self.url = url
        self._is_secure = parts.scheme == "https"
        self._host, self._path = parts.hostname, parts.path.rstrip("/")
        try:
            self._port = parts.port
        except ValueError as error:
            raise StartError(f"--url must be host:port, not '{url}'") from error

    def submit(self, document: dict[str, Any]) -> dict[str, Any]:
        """Submits a job; what is told of it. Raises StartError with the server's reason, or Unreachable, as all here."""
        return self._ask("POST", "/v2/jobs", document)

    def list(self) -> list[dict[str, Any]]:
        """All jobs, the newest first."""
        return [job for job in self._ask("GET", "/v2/jobs").get("jobs", ()) if isinstance(job, dict)]

    def status(self, id: str) -> dict[str, Any]:
        """One job."""
        return self._ask("GET", f"/v2/jobs/{quote(id, safe='')}")

    def control(self, id: str, verb: str) -> dict[str, Any]:
        """Pauses, resumes, cancels or retries a job; what is told of it then."""
        return self._ask("POST", f"/v2/jobs/{quote(id, safe='')}/{verb}")

    def _ask(self, method: str, path: str, document: Any = None) -> dict[str, Any]:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self.timeout_s)
        body = None if document is None else json.dumps(document).encode()
        try:
            connection.request(method, self._path + path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            told = json.loads(answer.read())
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self.url} does not answer: {error or type(error).__name__}") from error
        except ValueError as error:
            raise StartError(f"{self.url} does not answer as Weir does") from error
        finally:
            connection.close()
        if not isinstance(told, dict):
            raise StartError(f"{self.url} does not answer as Weir does")
        if answer.status == 503:
            raise Unreachable(str(told.get("error", "unavailable")))
        if answer.status >= 400:
            raise StartError(str(told.get("error", f"HTTP status {answer.status}")))
        return told

"""`JobsClient`: the HTTP client of `weir batch` for a gateway's jobs API."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import quote, urlsplit

from weir.errors import StartError


class Unreachable(Exception):
    """The server can't be reached at present. The message says why."""


class JobsClient:
    """The offline jobs of the server at `url` ("host:port", or with http:// or https:// before it).

    `hint` is added to the error message if the server can't be reached. Each request has a timeout of `timeout_s`.
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
        """Submit a job and return its status.

        As all methods, raises StartError with the server's reason, or Unreachable.
        """
        return self._request("POST", "/v2/jobs", document)

    def list(self) -> list[dict[str, Any]]:
        """The status of all jobs, newest first."""
        return [job for job in self._request("GET", "/v2/jobs").get("jobs", ()) if isinstance(job, dict)]

    def status(self, id: str) -> dict[str, Any]:
        """The status of one job."""
        return self._request("GET", f"/v2/jobs/{quote(id, safe='')}")

    def control(self, id: str, verb: str) -> dict[str, Any]:
        """Pause, resume, cancel or retry a job and return its status afterwards."""
        return self._request("POST", f"/v2/jobs/{quote(id, safe='')}/{verb}")

    def _request(self, method: str, path: str, document: Any = None) -> dict[str, Any]:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self.timeout_s)
        body = None if document is None else json.dumps(document).encode()
        try:
            connection.request(method, self._path + path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            reply = json.loads(response.read())
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self.url} is not reachable: {error or type(error).__name__}") from error
        except ValueError as error:
            raise StartError(f"the server at {self.url} is not a Weir gateway: unexpected response") from error
        finally:
            connection.close()
        if not isinstance(reply, dict):
            raise StartError(f"the server at {self.url} is not a Weir gateway: unexpected response")
        if response.status == 503:
            raise Unreachable(str(reply.get("error", "unavailable")))
        if response.status >= 400:
            raise StartError(str(reply.get("error", f"HTTP status {response.status}")))
        return reply

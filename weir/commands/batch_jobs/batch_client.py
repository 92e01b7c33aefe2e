"""`JobsClient`: the HTTP client of `weir batch` for a gateway's jobs API."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from weir.commands.gateway_client import GatewayClient, Unreachable

__all__ = ["JobsClient", "Unreachable"]


class JobsClient(GatewayClient):
    """The offline jobs of a server. All methods raise StartError with the server's reason, or Unreachable."""

    def submit(self, document: dict[str, Any]) -> dict[str, Any]:
        """Submit a job and return its status."""
        return self.request("POST", "/v2/jobs", document)

    def list(self) -> list[dict[str, Any]]:
        """The status of all jobs, newest first."""
        return [job for job in self.request("GET", "/v2/jobs").get("jobs", ()) if isinstance(job, dict)]

    def status(self, id: str) -> dict[str, Any]:
        """The status of one job."""
        return self.request("GET", f"/v2/jobs/{quote(id, safe='')}")

    def control(self, id: str, verb: str) -> dict[str, Any]:
        """Pause, resume, cancel or retry a job and return its status afterwards."""
        return self.request("POST", f"/v2/jobs/{quote(id, safe='')}/{verb}")

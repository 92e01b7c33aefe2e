"""A real server with an access policy, and keys for its roles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.support.servers.weir_server import Server, clean_environment
from tests.support.waiting import wait_until


def weir(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    command = [sys.executable, "-P", "-m", "weir", *words]
    return subprocess.run(command, env=clean_environment(folder), capture_output=True, text=True, timeout=60.0)


class Guarded(Server):
    """A server with the policy `policy` (YAML)."""

    def __init__(
        self, folder: Path, repository: Path, policy: str, *options: str, environment: dict[str, str] | None = None
    ) -> None:
        self.policy = folder / "policy.yaml"
        self.policy.write_text(policy)
        super().__init__(folder, repository, f"--access-policy={self.policy}", *options, environment=environment)

    def new_key(self, name: str, role: str, *options: str) -> str:
        """A new key, once all gateways let it in."""
        made = weir(self.folder, "key", "create", name, f"--role={role}", f"--nats={self.nats_url}", *options)
        assert made.returncode == 0, made.stderr
        key = made.stdout.strip()
        wait_until(lambda: self.ask("GET", "/v2/health/live", key).status_code == 200)
        return key

    def revoke(self, name: str) -> None:
        """Takes the keys of this name back."""
        assert weir(self.folder, "key", "revoke", name, f"--nats={self.nats_url}").returncode == 0

    def ask(self, method: str, path: str, key: str = "", **more: Any) -> httpx.Response:
        """One HTTP request that shows `key`."""
        headers = {**more.pop("headers", {}), **({"authorization": f"Bearer {key}"} if key else {})}
        return httpx.request(method, f"http://{self.http_place}{path}", headers=headers, timeout=30.0, **more)


def infer_body(size: int = 4) -> dict[str, Any]:
    """A request of an identity model of FP32."""
    return {"inputs": [{"name": "IN", "shape": [1, size], "datatype": "FP32", "data": [0.5] * size}]}

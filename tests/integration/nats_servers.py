"""nats-server as an operator may run it: with the configuration that a test wants, on ports that it takes itself."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

from serving import wait_until

from bus.embedded import find_binary


class GivenNats:
    """One server with its store in `folder`; `syncs` is its `sync_interval`, None for nats-server's own."""

    def __init__(self, folder: Path, syncs: str | None = None, monitor: bool = True, **options: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {
            "listen": "127.0.0.1:-1",
            "jetstream": {"store_dir": str(folder), **({"sync_interval": syncs} if syncs else {})},
            "ports_file_dir": str(folder),
            **({"http": "127.0.0.1:-1"} if monitor else {}),
            **options,
        }
        self._file = folder / "nats.conf"
        self._config = config
        self._file.write_text(json.dumps(config))
        self.process = subprocess.Popen([find_binary(), "-c", self._file], stderr=subprocess.DEVNULL)
        self._ports = folder / f"nats-server_{self.process.pid}.ports"
        wait_until(lambda: bool(self._read()))
        told = self._read()
        self.url: str = told["nats"][0]
        self.monitor: str = told["monitoring"][0] if monitor else ""

    def _read(self) -> dict[str, list[str]]:
        try:
            told: dict[str, list[str]] = json.loads(self._ports.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return told

    def reload(self, **changes: Any) -> None:
        """Has it read its configuration again, with other options."""
        self._file.write_text(json.dumps({**self._config, "listen": self.url.split("//")[1], **changes}))
        self.process.send_signal(signal.SIGHUP)

    def stop(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.wait()

"""`local_servers`: the nats-servers of `weir serve` that run on this machine, by the files they leave in their folders."""

from __future__ import annotations

import json
import os
from pathlib import Path


def data_home() -> Path:
    """The folder in which `weir serve` keeps a data folder for each port, unless it is told otherwise."""
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "weir"


def local_servers(folder: Path | None = None) -> dict[Path, str]:
    """The URL of each that runs, by its data folder: of `folder` alone, or of all in `data_home`."""
    folders = [folder] if folder is not None else sorted(data_home().glob("*"))
    found = {}
    for one in folders:
        for ports in one.glob("nats-server_*.ports"):
            url = _url(ports)
            if url:
                found[one] = url
    return found


def _url(ports: Path) -> str:
    pid = ports.stem.rpartition("_")[2]
    try:
        # What was killed has left its file behind.
        is_running = pid.isdigit() and b"nats-server.conf" in Path(f"/proc/{pid}/cmdline").read_bytes()
        url = json.loads(ports.read_text())["nats"][0]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return ""
    return url if is_running and isinstance(url, str) else ""

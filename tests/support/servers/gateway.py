"""`OwnGateway`: a second gateway in front of a running server, with its own options."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.servers.endpoints import Endpoints
from tests.support.servers.roles import started
from tests.support.servers.weir_server import Server

_RUN = """
import json, sys
from weir.gateway.main import FEATURES, run
from weir.gateway.settings import GatewaySettings
sys.exit(run(GatewaySettings(**json.loads(sys.argv[1])), FEATURES - {sys.argv[2]}))
"""


class OwnGateway(Endpoints):
    """One gateway process; `told` is what it announced: its ports, or why it does not start.

    `without` is the one of its features that it has not.
    """

    def __init__(self, folder: Path, server: Server, without: str = "", **settings: Any) -> None:
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
        self._log = folder / "log"
        reply = json.dumps({"nats_url": server.nats_url, **ports, **settings})
        self.process, self.told = started(["-c", _RUN, reply, without], folder, self._log)
        places = [f"127.0.0.1:{self.told.get(name, 0)}" for name in ports]
        super().__init__(*places)

    def log(self) -> str:
        """What it wrote."""
        return self._log.read_text()


@contextlib.contextmanager
def own_gateway(folder: Path, server: Server, without: str = "", **settings: Any) -> Iterator[OwnGateway]:
    """A gateway with these settings; one that starts must stop cleanly."""
    gateway = OwnGateway(folder, server, without, **settings)
    try:
        yield gateway
        if gateway.told.get("ready"):
            gateway.process.terminate()
        assert gateway.process.wait(30) == (0 if gateway.told.get("ready") else 1), gateway.log()
    finally:
        gateway.process.kill()
        gateway.process.wait()

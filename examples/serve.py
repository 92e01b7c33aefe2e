"""`make serve`: serve the demo's repository in the foreground, and show a request to try.

What follows the command's name is passed on to `weir serve`. Without, the ports are those that the pages name: 8000 for
HTTP, 8001 for gRPC, 8002 for metrics, and 4222 for NATS, which is not a default of `weir serve`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tritonclient import http as triton

from examples.demo_repository import DEMO_FOLDER, build_demo_repository
from examples.demo_server import DemoServer, running_server
from examples.recognise_files import MODEL, features

OPTIONS = (f"--data-dir={DEMO_FOLDER / 'data'}", "--nats-port=4222")
"""What `make serve` gives to `weir serve` beside the repository."""


def main(options: Sequence[str]) -> None:
    """Serves until told to stop, by Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    repository = build_demo_repository(DEMO_FOLDER / "models")
    with suppress(KeyboardInterrupt), running_server(repository, [*OPTIONS, *options]) as server:
        print(server.block, end="")
        for line in server.process.stdout or ():
            print(line, end="")
            if not line.strip():
                break
        print(to_try(server), flush=True)
        server.process.wait()


def to_try(server: DemoServer) -> str:
    """Commands that ask each of the networks."""
    python = os.path.relpath(sys.executable)
    return (
        f"Try it: hear speech, read a picture, tell which kind of file {Path(__file__).name} is\n\n"
        f"  {python} -m examples.vad_streams --url={server.grpc}\n"
        f"  {python} -m examples.read_picture --url={server.http}\n"
        f"  {curl(server)}\n"
    )


def curl(server: DemoServer) -> str:
    """A command that asks for the best three labels of this file; its request is written beside the repository."""
    with triton.InferenceServerClient(server.http) as client:
        row = features(triton, client, Path(__file__).read_bytes())
    request = {
        "inputs": [{"name": "bytes", "datatype": "INT32", "shape": list(row.shape), "data": row.tolist()}],
        "outputs": [{"name": "target_label", "parameters": {"classification": 3}}],
    }
    path = DEMO_FOLDER / "request.json"
    path.write_text(json.dumps(request))
    return f"curl -s http://{server.http}/v2/models/{MODEL}/infer -d @{path}"


if __name__ == "__main__":
    main(sys.argv[1:])

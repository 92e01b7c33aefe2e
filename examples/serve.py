"""`make serve`: serve the demo's repository in the foreground, and show a request to try.

What follows the command's name is passed on to `weir serve`.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tritonclient import http as triton

from examples.demo import MODEL, features
from examples.demo_repository import DEMO_FOLDER, build_demo_repository
from examples.demo_server import DemoServer, running_server


def main(options: Sequence[str]) -> None:
    """Serves until told to stop, by Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    repository = build_demo_repository(DEMO_FOLDER / "models")
    with (
        suppress(KeyboardInterrupt),
        running_server(repository, [f"--data-dir={DEMO_FOLDER / 'data'}", *options]) as server,
    ):
        print(server.block, end="")
        for line in server.process.stdout or ():
            print(line, end="")
            if not line.strip():
                break
        print(f"Try it: which kind of file is {__file__.rpartition('/')[2]}?\n\n  {curl(server)}\n", flush=True)
        server.process.wait()


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

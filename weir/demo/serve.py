"""`weir demo --serve`: serves the demo's repositories in the foreground, and prints a request to try."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tritonclient import http as triton

from weir.demo.files import MODEL, features
from weir.demo.networks import installed_networks, missing_text
from weir.demo.repository import build_demo_repositories
from weir.demo.samples import write_samples
from weir.demo.server import DemoServer, running_server


def serve_options(folder: Path) -> tuple[str, ...]:
    """The options of `weir serve` with `folder`, besides the repositories. NATS has no fixed port by default."""
    jobs = folder / "jobs"
    jobs.mkdir(parents=True, exist_ok=True)
    return f"--data-dir={folder / 'data'}", "--nats-port=4222", "--console-allow-changes", f"--batch-root={jobs}"


def serve(folder: Path, options: Sequence[str] = ()) -> None:
    """Serve the models at hand with further `weir serve` options until Ctrl-C or SIGTERM.

    Raises StartError if the server can't start.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    networks = installed_networks()
    repositories = build_demo_repositories(folder, networks)
    samples = write_samples(folder / "samples", networks)
    with suppress(KeyboardInterrupt), running_server(repositories, [*serve_options(folder), *options]) as server:
        print(server.block, end="")
        for line in server.process.stdout or ():
            print(line, end="")
            if not line.strip():
                break
        print(missing_text(networks), end="")
        print(to_try(server, folder))
        print(f"Files to try in the console: {samples}\n", flush=True)
        server.process.wait()


def to_try(server: DemoServer, folder: Path) -> str:
    """Commands that call the models; those of the example programs if the current folder has them."""
    commands = [curl(server, folder)]
    if Path("examples", "vad_streams.py").is_file():
        python = shlex.quote(os.path.relpath(sys.executable))
        commands = [
            f"{python} -m examples.vad_streams --url={server.grpc}",
            f"{python} -m examples.read_picture --url={server.http}",
            *commands,
        ]
    return "".join(["Try it:\n\n", *(f"  {command}\n" for command in commands)])


def curl(server: DemoServer, folder: Path) -> str:
    """A command that requests the best three labels of this file; its request is written to `folder`."""
    with triton.InferenceServerClient(server.http) as client:
        row = features(triton, client, Path(__file__).read_bytes())
    request = {
        "inputs": [{"name": "bytes", "datatype": "INT32", "shape": list(row.shape), "data": row.tolist()}],
        "outputs": [{"name": "target_label", "parameters": {"classification": 3}}],
    }
    path = folder / "request.json"
    path.write_text(json.dumps(request))
    return f"curl -s http://{server.http}/v2/models/{MODEL}/infer -d @{shlex.quote(str(path))}"

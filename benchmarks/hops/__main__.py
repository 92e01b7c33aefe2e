"""The functions that one request passes: `python -m benchmarks.hops` prints them per role, in the order of first calls.

A server with one model is asked one request after another over a kept connection. Between the bytes of a request and those
of its response all calls are noted in all processes (`sys.setprofile`). What was called for each of the requests belongs
to a request; the rest is timers and other housekeeping. Telemetry (`weir.telemetry`) is left out: it is as much again where
a deployment turns it on. `--json` prints the same for programs.
"""

from __future__ import annotations

import http.client
import json
import mmap
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import typer
from tritonclient import http as triton

from tests.support.models.zoo import write_identity
from tests.support.servers.weir_server import Server

REQUESTS = 20
PROBE = Path(__file__).parent / "probe"
ROOT = Path(__file__).parents[2]
ROLES = ("gateway", "scheduler", "worker")
LEFT_OUT = ("weir.telemetry",)


@contextmanager
def served() -> Iterator[tuple[Server, Path]]:
    """A server whose processes have the probe, and the file by which they are told to note."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_identity(folder / "models", "identity", "FP32", "")
        flag = folder / "capture"
        flag.write_bytes(b"\0")
        probe = {"WEIR_HOPS": str(flag), "PYTHONPATH": str(PROBE)}
        server = Server(folder, folder / "models", "--allow-console=false", environment=probe)
        try:
            yield server, flag
        finally:
            server.close()


def body() -> tuple[bytes, dict[str, str]]:
    """A request of four numbers, as `tritonclient` sends it."""
    tensor = triton.InferInput("IN", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
    data, header_length = triton.InferenceServerClient.generate_request_body([tensor])
    headers = {} if header_length is None else {"Inference-Header-Content-Length": str(header_length)}
    return data, headers


def capture(server: Server, flag: Path) -> list[dict[str, list[str]]]:
    """What each role called for each of the requests."""
    data, headers = body()
    connection = http.client.HTTPConnection(server.http_place, timeout=30)
    with flag.open("r+b") as file, mmap.mmap(file.fileno(), 1) as shared:

        def ask() -> None:
            connection.request("POST", "/v2/models/identity/infer", data, headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            response.read()

        for _ in range(200):  # what runs once has run
            ask()
        for number in range(1, REQUESTS + 1):
            shared[0] = number
            ask()
            shared[0] = 0
            ask()  # every process that was asked calls something, and writes what it has noted
            time.sleep(0.05)
    connection.close()
    return [_read(flag, number) for number in range(1, REQUESTS + 1)]


def _read(flag: Path, number: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for file in flag.parent.glob(f"{flag.name}.{number}.*"):
        noted = json.loads(file.read_text())
        role = next((role for role in ROLES if role in noted["title"]), "")
        if role:
            found.setdefault(role, []).extend(filter(None, (_name(*row) for row in noted["rows"])))
    return found


def _name(file: str, function: str) -> str:
    """`module:function`, "" for what is not Weir's."""
    path = Path(file)
    if not path.is_relative_to(ROOT) or path.is_relative_to(ROOT / ".venv"):
        return ""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    module = module if module.startswith("weir.") else f"weir.{module}"
    if module.startswith((*LEFT_OUT, "weir.benchmarks", "weir.tests")):
        return ""
    return f"{module}:{function}"


def common(captures: list[dict[str, list[str]]]) -> dict[str, list[str]]:
    """What was called for every request, in the order of the first one."""
    first, *others = captures
    return {
        role: [
            name for name in dict.fromkeys(first.get(role, [])) if all(name in found.get(role, ()) for found in others)
        ]
        for role in ROLES
    }


def main(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """Print the functions that one request passes."""
    with served() as (server, flag):
        found = common(capture(server, flag))
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for role, names in found.items():
        print(f"{role}: {len(names)} functions of {len({name.partition(':')[0] for name in names})} modules")
        for name in names:
            print(f"  {name}")
    every = {name for names in found.values() for name in names}
    print(f"in all: {len(every)} functions of {len({name.partition(':')[0] for name in every})} modules")


if __name__ == "__main__":
    typer.run(main)

"""The functions that one request passes: `python -m benchmarks.hops` prints them per role, in the order of first calls.

A server with one model is asked one request after another over a kept connection. Between the bytes of a request and those
of its response all calls are noted in all processes (`sys.setprofile`). What was called for nearly all requests belongs
to a request; the rest is timers and other housekeeping. Telemetry is left out: traces, and the modules that count for
statistics. Comprehensions count with their function. `--page` prints the list as docs/architecture.md shows it.
"""

from __future__ import annotations

import http.client
import json
import mmap
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import typer
from tritonclient import http as triton

from tests.support.models.zoo import write_identity
from tests.support.servers.weir_server import Server

REQUESTS = 20
USUAL = 1.0
"""The share of the requests that a function must be called for, to be printed. Schedulers and workers do what follows a
response before its last byte for some requests, and after it for others."""

PROBE = Path(__file__).parent / "probe"
ROOT = Path(__file__).parents[2]
ROLES = ("gateway", "scheduler", "worker")
LEFT_OUT = (
    "weir.telemetry",
    "weir.worker.execution.statistics",
    "weir.scheduler.service.statistics",
    "weir.benchmarks",
    "weir.tests",
)


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
    if module.startswith(LEFT_OUT) or function.endswith("comp>"):
        return ""
    return f"{module}:{function}"


def called(captures: list[dict[str, list[str]]], share: float) -> dict[str, list[str]]:
    """What was called for at least this share of the requests, by role, in the order of first calls."""
    counts = {role: Counter(name for found in captures for name in set(found.get(role, ()))) for role in ROLES}
    order = {role: dict.fromkeys(name for found in captures for name in found.get(role, ())) for role in ROLES}
    return {role: [name for name in order[role] if counts[role][name] >= share * len(captures)] for role in ROLES}


def measured() -> list[dict[str, list[str]]]:
    """The functions that each of some requests passes, as `module:function`, by role."""
    with served() as (server, flag):
        return capture(server, flag)


def counted(names: Iterable[str]) -> str:
    """How many functions and modules these are."""
    every = set(names)
    return f"{len(every)} functions of {len({name.partition(':')[0] for name in every})} modules"


def page(found: dict[str, list[str]]) -> str:
    """The list as the architecture's page shows it: each module once for each role, with its functions behind it."""
    lines = ["```text", f"IN ALL, {counted(name for names in found.values() for name in names)}"]
    for role, names in found.items():
        lines.append(f"{role.upper()}, {counted(names)}")
        modules: dict[str, list[str]] = {}
        for name in names:
            module, _, function = name.removeprefix("weir.").replace(".<locals>", "").partition(":")
            modules.setdefault(module, []).append(function)
        for module, functions in modules.items():
            lines += textwrap.wrap(f"{module}: {', '.join(_without_repeated(functions))}", 180, subsequent_indent="  ")
    return "\n".join([*lines, "```"])


def _without_repeated(functions: Iterable[str]) -> Iterator[str]:
    """The functions, without the name of their class where the one before it has the same."""
    before = ""
    for function in functions:
        owner, _, method = function.rpartition(".")
        yield f".{method}" if owner and owner == before else function
        before = owner


def main(as_page: bool = typer.Option(False, "--page", help="Print it as the page shows it.")) -> None:
    """Print the functions that one request passes."""
    found = called(measured(), USUAL)
    if as_page:
        print(page(found))
        return
    for role, names in found.items():
        print(f"{role}: {counted(names)}")
        for name in names:
            print(f"  {name}")
    print(f"in all: {counted(name for names in found.values() for name in names)}")


if __name__ == "__main__":
    typer.run(main)

"""`Server`: a whole server inside a Python program, for scripts, notebooks and tests.

    from weir import Server

    with Server(model_repository="models") as server:
        server.infer("model", {"INPUT": array})["OUTPUT"]

It is `weir serve` as a process of its own, on free ports and with a data folder that goes with it. It ends with the
`with`, and also when the program ends without having stopped it, or is killed.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weir.client import Client
from weir.options import SERVE, Option, options_of
from weir.server_process import ServerProcess
from weir.start_error import StartError

_DEFAULTS: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "exit_on_error": True}
"""Where a program's server differs from that of the command line."""


class Server(Client):
    """A server of the models in `model_repository` (a folder, or several).

    `options` are those of `weir serve`, by their names with underscores: `model_control_mode="explicit"`,
    `load_model=["a", "b"]`, `log_verbose=1`. Other than there, ports are free ones, and a model that can't be loaded
    is an error of the start unless `exit_on_error=False`. `start_timeout_s` is how long the start may take. It is
    started by `start()` or `with`; see `Client` for what it can be asked.
    """

    def __init__(
        self,
        model_repository: str | Path | Sequence[str | Path],
        *,
        start_timeout_s: float = 120.0,
        **options: Any,
    ) -> None:
        super().__init__("")
        paths = [model_repository] if isinstance(model_repository, str | Path) else model_repository
        given = {**_DEFAULTS, **options, "model_repository": [str(path) for path in paths]}
        self._exit_timeout_s = float(given.get("exit_timeout_secs", 30.0))
        self._start_timeout_s = start_timeout_s
        self._words = _words(given)
        self._process: ServerProcess | None = None
        self._facts: dict[str, str] = {}

    def start(self) -> Self:
        """Start it and wait until it is ready. Raises StartError with its last log lines when it can't start."""
        if self._process is None:
            process = ServerProcess(self._words, self._exit_timeout_s)
            self._facts = process.wait_ready(self._start_timeout_s)
            if "grpc" not in self._facts:
                process.stop()
                raise StartError("a server without gRPC can't be asked from a program")
            self._process = process
            self.grpc_url = self._facts["grpc"]
        return self

    def stop(self) -> None:
        """Let it finish what it runs, and end it. Nothing of it is left then; it may be started again."""
        self.close()
        if self._process is not None:
            process, self._process = self._process, None
            process.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
        await asyncio.to_thread(self.stop)

    @property
    def http_address(self) -> str:
        """Where it listens for HTTP, as `tritonclient.http` wants it: "host:port"."""
        return self._fact("http")

    @property
    def http_url(self) -> str:
        """Where it listens for HTTP: "http://host:port"."""
        return f"http://{self._fact('http')}"

    @property
    def metrics_url(self) -> str:
        """Where its metrics are: "http://host:port/metrics"."""
        return f"http://{self._fact('metrics')}/metrics"

    @property
    def nats_url(self) -> str:
        """Its message bus, with user and password: "nats://user:password@host:port"."""
        return self._fact("nats_url")

    @property
    def pid(self) -> int:
        """The process that minds all others."""
        return self._running().pid

    def log(self) -> str:
        """What it has logged since its start, unless that goes elsewhere by `log_file`."""
        return self._running().log()

    def _running(self) -> ServerProcess:
        if self._process is None:
            raise StartError("the server is not running: call its start(), or use it in a with statement")
        return self._process

    def _address(self) -> str:
        self._running()
        return self.grpc_url

    def _fact(self, name: str) -> str:
        self._running()
        if name not in self._facts:
            raise StartError(f"the server does not listen for {name}")
        return self._facts[name]


def _words(given: dict[str, Any]) -> list[str]:
    """`given` as words of a command line. Raises TypeError for an option that does not exist."""
    known = options_of(SERVE)
    words: list[str] = []
    for key, value in given.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            raise TypeError(f"there is no option {key!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
        words += _written(known[key], value)
    return words


def _written(option: Option, value: Any) -> list[str]:
    if value is None:
        return []
    if option.repeatable and isinstance(value, str | Path):
        value = (value,)
    values = tuple(value) if option.repeatable else (value,)
    return [f"{option.name}={_text(one)}" for one in values]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

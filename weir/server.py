"""`Server`: a complete server started by a Python program, for scripts, notebooks and tests.

    from weir import Server

    with Server(model_repository="models") as server:
        server.infer("model", {"INPUT": array})["OUTPUT"]

It is a `weir serve` in a process of its own, on free ports and with a temporary data folder. It stops at the end of the
`with` block, and also when the program exits without stopping it or is killed.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from weir.client import Client
from weir.errors import StartError
from weir.options import SERVE, Option, options_of
from weir.options.secret import Secret, as_variable
from weir.server_process import ServerProcess

_DEFAULTS: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "exit_on_error": True}
"""Defaults that differ from those of `weir serve`."""


class Server(Client):
    """A server of the models in `model_repository` (one folder or several).

    `options` are those of `weir serve`, with underscores: `model_control_mode="explicit"`, `load_model=["a", "b"]`,
    `log_verbose=1`. Unlike there, ports are selected automatically, and a model that fails to load is a StartError unless
    `exit_on_error=False`. `start_timeout_s` bounds the start. `start()` or `with` starts the server; the methods of
    `Client` send requests to it, and show `api_key` where there is an `access_policy`.
    """

    def __init__(
        self,
        model_repository: str | Path | Sequence[str | Path],
        *,
        start_timeout_s: float = 120.0,
        api_key: str = "",
        **options: Any,
    ) -> None:
        super().__init__("", api_key=api_key)
        paths = [model_repository] if isinstance(model_repository, str | Path) else model_repository
        given = {**_DEFAULTS, **options, "model_repository": [str(path) for path in paths]}
        self._exit_timeout_s = float(given.get("exit_timeout_secs", 30.0))
        self._start_timeout_s = start_timeout_s
        self._arguments, secrets = _arguments(given)
        self._environment = as_variable(secrets)
        self._process: ServerProcess | None = None
        self._facts: dict[str, str] = {}

    def start(self) -> Self:
        """Start the server and wait until it is ready. Raises StartError with its last log lines if it can't start."""
        if self._process is None:
            process = ServerProcess(self._arguments, self._exit_timeout_s, self._environment)
            self._facts = process.wait_ready(self._start_timeout_s)
            if "grpc" not in self._facts:
                process.stop()
                raise StartError("weir.Server needs gRPC: allow_grpc must be true")
            self._process = process
            self.grpc_url = self._facts["grpc"]
            if "grpc_tls_cert" in self._facts:
                self.credentials = grpc.ssl_channel_credentials(Path(self._facts["grpc_tls_cert"]).read_bytes())
        return self

    def stop(self) -> None:
        """Stop the server after its running requests. It may be started again."""
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
        """The HTTP address in the form of `tritonclient.http`: "host:port"."""
        return self._fact("http")

    @property
    def http_url(self) -> str:
        """The HTTP URL: "http://host:port", with TLS "https://host:port"."""
        return f"{self._scheme}://{self._fact('http')}"

    @property
    def metrics_url(self) -> str:
        """The URL of its metrics: "http://host:port/metrics"."""
        return f"{self._scheme}://{self._fact('metrics')}/metrics"

    @property
    def tls_cert(self) -> str:
        """The file with the certificate of its HTTP ports; "" without TLS."""
        self._running()
        return self._facts.get("tls_cert", "")

    @property
    def nats_url(self) -> str:
        """The URL of its broker with user and password: "nats://user:password@host:port"."""
        return self._fact("nats_url")

    @property
    def pid(self) -> int:
        """The process id of its supervisor."""
        return self._running().pid

    def log(self) -> str:
        """Its log since the start, unless `log_file` redirects it."""
        return self._running().log()

    @property
    def _scheme(self) -> str:
        return "https" if self.tls_cert else "http"

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
            raise StartError(f"{name} is not enabled on this server")
        return self._facts[name]


def _arguments(given: dict[str, Any]) -> tuple[list[str], dict[str, list[str]]]:
    """`given` as command line arguments, and the texts of options that may hold secrets, by key.

    Raises TypeError for an unknown option.
    """
    options = options_of(SERVE)
    arguments: list[str] = []
    secrets: dict[str, list[str]] = {}
    for key, value in given.items():
        if key not in options:
            close = difflib.get_close_matches(key, options, 1)
            raise TypeError(f"unknown option {key!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
        texts = _texts(options[key], value)
        if isinstance(options[key].value, Secret) and texts:
            secrets[key] = texts
        else:
            arguments += [f"{options[key].name}={text}" for text in texts]
    return arguments, secrets


def _texts(option: Option, value: Any) -> list[str]:
    if value is None:
        return []
    if option.repeatable and isinstance(value, str | Path):
        value = (value,)
    values = tuple(value) if option.repeatable else (value,)
    return [_text(one) for one in values]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

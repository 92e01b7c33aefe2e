"""`GatewayClient`: the HTTP client of commands for the APIs of a gateway."""

from __future__ import annotations

import http.client
import json
import shlex
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import typer

from weir.commands.local.servers import local_certificate
from weir.commands.running_server import DEFAULT_HTTP, data_dir_option, none_found_hint, only_local_server
from weir.errors import StartError
from weir.options.api_key import authorization, hint_for_denied
from weir.runtime.certificates import CLIENT_CERT_VARIABLE, client_context

_EVENT = b"data: "


class Unreachable(Exception):
    """The server can't be reached at present. The message says why."""


class GatewayClient:
    """The server at `url` ("host:port", or with http:// or https:// before it).

    `hint` is added to the error message if the server can't be reached. Each request has a timeout of `timeout_s`. `option`
    selects the same server in another command, with a leading space; "" for the default server.
    """

    def __init__(
        self, url: str, hint: str = "", headers: Mapping[str, str] | None = None, timeout_s: float = 30.0
    ) -> None:
        self.hint = hint
        self.option = ""
        self.timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._key: Mapping[str, str] = {}
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StartError(f"--url must be host:port, not '{url}'")
        self.url = url
        self._is_secure = parts.scheme == "https"
        self._context: ssl.SSLContext | None = None
        self._host, self._path = parts.hostname, parts.path.rstrip("/")
        try:
            self._port = parts.port
        except ValueError as error:
            raise StartError(f"--url must be host:port, not '{url}'") from error

    def show_key(self, api_key: str) -> None:
        """Show the key of option `--api-key` ("": that of the environment) with each request. Raises UsageError."""
        self._key = authorization(api_key)

    def request(self, method: str, path: str, document: Any = None) -> dict[str, Any]:
        """The JSON object that the server responds with. Raises StartError with the server's reason, or Unreachable."""
        reply = self.request_json(method, path, document)
        if not isinstance(reply, dict):
            raise self._not_a_gateway()
        return reply

    def request_json(self, method: str, path: str, document: Any = None) -> Any:
        """The JSON value that the server responds with. Raises StartError with the server's reason, or Unreachable."""
        _, body = self.exchange(method, path, None if document is None else json.dumps(document).encode())
        return self._json(body)

    def exchange(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[Message, bytes]:
        """The headers and the body of the response. Raises StartError with the server's reason, or Unreachable."""
        with self._response(method, path, body, headers or {}) as response:
            return response.headers, response.read()

    def events(self, path: str, document: Any) -> Iterator[Any]:
        """The JSON value of each server-sent event of the response to a POST, as they arrive. Raises as `exchange`."""
        with self._response("POST", path, json.dumps(document).encode(), {}) as response:
            for line in response:
                if line.startswith(_EVENT):
                    yield self._json(line.removeprefix(_EVENT))

    @contextmanager
    def _response(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        """A response without an error, as long as it is read."""
        connection = self._connection()
        try:
            connection.request(method, self._path + path, body, {**self._headers, **self._key, **headers})
            response = connection.getresponse()
            if response.status >= 400:
                raise self._error(response.status, response.read())
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self.url} is not reachable: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if not self._is_secure:
            return http.client.HTTPConnection(self._host, self._port, timeout=self.timeout_s)
        if self._context is None:
            try:
                self._context = client_context(local_certificate(self._host, self._port or 443))
            except OSError as error:
                raise StartError(f"the certificate of {CLIENT_CERT_VARIABLE} can't be used: {error}") from error
        return http.client.HTTPSConnection(self._host, self._port, timeout=self.timeout_s, context=self._context)

    def _error(self, status: int, body: bytes) -> Exception:
        """The server's reason, which a stream of events has in its first event."""
        reply = self._json(body.removeprefix(_EVENT))
        if not isinstance(reply, dict):
            return self._not_a_gateway()
        if status == 503:
            return Unreachable(str(reply.get("error", "unavailable")))
        reason = str(reply.get("error", f"HTTP status {status}"))
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            reason = f"{reason}. {hint_for_denied(bool(self._key))}"
        return StartError(reason)

    def _json(self, body: bytes) -> Any:
        try:
            return json.loads(body)
        except ValueError as error:
            raise self._not_a_gateway() from error

    def _not_a_gateway(self) -> StartError:
        return StartError(f"the server at {self.url} is not a Weir gateway: unexpected response")


Client = TypeVar("Client", bound=GatewayClient)


def client_of(make: Callable[..., Client], url: str, data_dir: Path | None, api_key: str = "") -> Client:
    """A client of the server at `url`; without a URL, of the only local server, else of the default address.

    It shows the key of option `--api-key`. Raises UsageError if several local servers run, or for a key that can't be used,
    StartError if the only server serves no HTTP.
    """
    client = _client_of(make, url, data_dir)
    client.show_key(api_key)
    return client


def _client_of(make: Callable[..., Client], url: str, data_dir: Path | None) -> Client:
    if url and data_dir is None:
        return _with_option(make(url), option_of(url, None))
    server = only_local_server(data_dir, "--url HOST:PORT")
    if server is None:
        return make(DEFAULT_HTTP, f"{none_found_hint(DEFAULT_HTTP)}--url HOST:PORT.")
    if not server.http:
        raise StartError(f"the server found on this machine does not serve HTTP (yet): {server}")
    if data_dir is None:
        typer.echo(f"server found on this machine: {server}", err=True)
    return _with_option(make(server.http_place), option_of(server.http_place, data_dir))


def option_of(url: str, data_dir: Path | None) -> str:
    """The option that selects the server of a data folder, else that at `url`, with a leading space; "" for neither."""
    return data_dir_option(data_dir) or (f" --url {shlex.quote(url)}" if url else "")


def _with_option(client: Client, option: str) -> Client:
    client.option = option
    return client


def call(client: GatewayClient, ask: Callable[..., Any], *arguments: Any) -> Any:
    """What `ask(*arguments)`, a method of `client`, returns. Raises StartError if the server can't be reached."""
    try:
        return ask(*arguments)
    except Unreachable as error:
        raise StartError(f"{error}. {client.hint}" if client.hint else str(error)) from error

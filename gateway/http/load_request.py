"""The body of a load request over HTTP: a configuration and files in base64.

Source: Triton's model repository extension, and its server's responses to malformed bodies.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgpack

from weir.schemas.core.errors import internal, invalid
from weir.schemas.kserve.json_documents import load_json

READ_LOAD = "weir.gateway.http.load_request:read_load"
"""The operation of a helper process (`weir.runtime.offload`) that parses a long body, its only part."""

_FILE = "file:"
_NOT_TEXT = "attempt to access JSON non-string as string"


def load_parameters(body: bytes | memoryview) -> tuple[str | None, dict[str, bytes]]:
    """(configuration in JSON, files by path). Raises WeirError with the texts of Triton's JSON layer."""
    document: Any = load_json(body)
    if not isinstance(document, dict) or "parameters" not in document:
        return None, {}
    parameters = document["parameters"]
    if not isinstance(parameters, dict):
        raise internal("attempt to get members for non-object")
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if not isinstance(value, str):
            raise internal(_NOT_TEXT)
        if key == "config":
            config = value
        elif key.startswith(_FILE):
            files[key.removeprefix(_FILE)] = _decoded(key, value)
        else:
            raise internal("unexpected error on creating Triton parameter")
    return config, files


def read_load(parts: Sequence[memoryview]) -> list[bytes]:
    """Runs `load_parameters` in a helper process; `read_parameters` reads the result. Raises WeirError."""
    config, files = load_parameters(parts[0])
    return [msgpack.packb([config, list(files)], unicode_errors="surrogatepass"), *files.values()]


def read_parameters(parts: Sequence[memoryview]) -> tuple[str | None, dict[str, bytes]]:
    """The result of `load_parameters`, from the parts that `READ_LOAD` has returned."""
    config, paths = msgpack.unpackb(parts[0], unicode_errors="surrogatepass")
    return config, dict(zip(paths, map(bytes, parts[1:]), strict=True))


def _decoded(key: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:  # invalid characters, or an invalid number of them
        raise invalid(f"load parameter '{key}' is not base64: {error}") from error

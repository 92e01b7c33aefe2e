"""`run`: sends the request of `weir infer`, and prints the responses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weir.commands.gateway_client import GatewayClient, call, client_of
from weir.commands.infer.request import generate_document, read_request, sample_request
from weir.commands.terminal import one_line
from weir.errors import StartError
from weir.perf.inputs.model import InputError, read_model
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError
from weir.schemas.core.names import model_path
from weir.schemas.core.request_limits import DEFAULT_LIMITS
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import BY_CONFIG_NAME, Tensor
from weir.schemas.kserve.regions import no_regions
from weir.schemas.kserve.request import read_inputs
from weir.schemas.kserve.sample_inputs import needs_binary_outputs, sample_body

_HEADER_LENGTH = "Inference-Header-Content-Length"
_NOT_OUTPUTS = ("id", "model_name", "model_version")
"""Members of a generated response that are no outputs."""

_MAX_SHOWN = 16
"""A tensor with more elements is shown by its first and last ones."""

_MAX_TEXT = 200


class InferOptions(NamedTuple):
    """The options of the command; `version` "" is the server's choice, `inputs` are "NAME=VALUE", `data` "-" is stdin."""

    model: str
    version: str
    inputs: tuple[str, ...]
    data: str
    timeout_s: float
    as_json: bool


class _Row(NamedTuple):
    """A tensor as it is shown: name, datatype, shape ("" where a response does not say it) and values."""

    name: str
    datatype: str
    shape: str
    values: str


def run(options: InferOptions, url: str, data_dir: Path | None, api_key: str = "") -> None:
    """Send the request and print the responses as they arrive. Raises StartError with the reason, or UsageError."""
    client = client_of(
        lambda url, hint="": GatewayClient(url, hint, timeout_s=options.timeout_s), url, data_dir, api_key
    )
    path = model_path(options.model, options.version)
    try:
        config = read_model(call(client, client.request, "GET", f"{path}/config"))
    except InputError as error:
        raise StartError(str(error)) from error
    text: bytes | None = None
    if options.data:
        request, text = read_request(config, options.data)
    else:
        request = sample_request(config, options.inputs)
    started_s = time.monotonic()
    if config.is_decoupled:
        responses = _streamed(client, path, request, config)
    else:
        responses = _single(client, path, request, config, text)
    count = 0
    for title, rows, document in responses:
        if options.as_json:
            print(json.dumps(document), flush=True)
            continue
        if not count:
            _print("request", map(_row, request.inputs))
        _print(f"{title}, after {(time.monotonic() - started_s) * 1000:.1f} ms", rows)
        count += 1
    if config.is_decoupled and not options.as_json:
        print(f"{count} response{'' if count == 1 else 's'}")


_Response = tuple[str, list[_Row], dict[str, Any]]
"""The title of a response, its outputs as they are shown, and the response as JSON."""


def _single(
    client: GatewayClient, path: str, request: InferRequest, config: ModelConfig, text: bytes | None
) -> Iterator[_Response]:
    """The response to an infer request: to `text` if there is one."""
    body, json_length = text, None
    if body is None:
        body, json_length = sample_body(
            request.inputs,
            is_sequence=config.sequence_batching is not None,
            wants_binary=needs_binary_outputs(config),
        )
    headers = {} if json_length is None else {_HEADER_LENGTH: str(json_length)}
    received, content = call(client, client.exchange, "POST", f"{path}/infer", body, headers)
    try:
        length = int(received.get(_HEADER_LENGTH, len(content)))
        document = json.loads(content[:length])
        # The outputs of a response are written as the inputs of a request are.
        outputs = InferRequest(config.name)
        read_inputs(outputs, document["outputs"], memoryview(content)[length:], DEFAULT_LIMITS, no_regions)
        title = _title(document)
        rows = [_row(tensor) for tensor in outputs.inputs]
        document["outputs"] = [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(tensor.shape),
                "data": [_plain(element) for element in _values(tensor).ravel().tolist()],
            }
            for tensor in outputs.inputs
        ]
    except (ValueError, TypeError, KeyError, WeirError) as error:
        raise StartError(f"the response is not one of the KServe protocol: {error!r}") from error
    yield title, rows, document


def _streamed(client: GatewayClient, path: str, request: InferRequest, config: ModelConfig) -> Iterator[_Response]:
    """The responses of a decoupled model, through the generate extension."""
    datatypes = {output.name: BY_CONFIG_NAME[output.data_type].name for output in config.output}
    events = client.events(f"{path}/generate_stream", generate_document(request))
    while (event := call(client, next, events, None)) is not None:
        if "error" in event:
            raise StartError(str(event["error"]))
        outputs = {name: value for name, value in event.items() if name in datatypes and name not in _NOT_OUTPUTS}
        yield (
            _title(event),
            [_Row(name, datatypes[name], "", _short(_text(value))) for name, value in outputs.items()],
            event,
        )


def _title(document: Mapping[str, Any]) -> str:
    return f"response of {document.get('model_name', 'a model')}, version {document.get('model_version', 'unknown')}"


def _print(title: str, rows: Any) -> None:
    shown = [_Row(*map(one_line, row)) for row in rows]
    widths = [max((len(row[column]) for row in shown), default=0) for column in range(3)]
    print(one_line(title))
    for row in shown:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=False) if width]
        print("  " + "  ".join([*cells, row.values]), flush=True)


def _row(tensor: Tensor) -> _Row:
    with np.printoptions(threshold=_MAX_SHOWN, edgeitems=4, linewidth=1 << 16):
        text = np.array2string(_values(tensor), separator=", ", formatter={"all": _shown})
    return _Row(tensor.name, tensor.datatype, str(list(tensor.shape)), _short(" ".join(text.split())))


def _values(tensor: Tensor) -> np.ndarray:
    """The array of a tensor, BF16 as FP32."""
    array = tensor.to_numpy()
    return (array.astype(np.uint32) << 16).view(np.float32) if tensor.datatype == "BF16" else array


def _plain(element: Any) -> Any:
    return element.decode(errors="replace") if isinstance(element, bytes) else element


def _shown(element: Any) -> str:
    """An element of an array as a person reads it."""
    value = _plain(element)
    if isinstance(value, str | np.bool_):
        return _text(value if isinstance(value, str) else bool(value))
    return f"{value:.6g}" if isinstance(value, np.floating) else str(value)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}… ({len(text)} characters)"

"""The KServe v2 protocol in msgpack, ours: the same document as in JSON, with tensors as bytes in place.

A request is one map, with the fields of the JSON document: `id`, `parameters`, `inputs`, `outputs`. Keys are strings
(msgpack `str`). An input is a map of `name`, `datatype`, `shape`, `parameters` and `data`, which is one of:

- `bin`: the content itself, row-major and little-endian; BOOL has one byte for each element, FP16 and BF16 two, and each
  element of BYTES is its length in four bytes, little-endian, and that many bytes: as a binary tensor of the HTTP protocol;
- an array of values, flat or nested, by the rules of JSON: integers are taken for floats and never floats for integers;
  BYTES takes `str` and `bin`; FP16 and BF16 can't travel so.

A response is a map of `id` (where the request has one), `model_name`, `model_version`, `parameters` (where there are any)
and `outputs`: maps of `name`, `datatype`, `shape` and `data`, which is always `bin`. An error is `{"error": message}`.

All checks, texts and limits are those of JSON. Besides, a body that is not msgpack is INVALID_ARG, and what is not the
content of `bin` tensors may be `RequestLimits.json_values` bytes at most: so it can't hold more values than JSON may.

Source: the msgpack specification; extension types and timestamps mean nothing here, and are refused where a value is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack

from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.core.request_limits import DEFAULT_LIMITS, RequestLimits
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.core.tensors import Tensor
from weir.schemas.kserve.regions import FindRegion, no_regions
from weir.schemas.kserve.request import read_document
from weir.schemas.kserve.response import Labels, classify
from weir.schemas.wire.codec import bin_header

_BIN_HEADER_SIZES = {0xC4: 2, 0xC5: 3, 0xC6: 5}
_NOTHING = memoryview(b"")

_packer = msgpack.Packer(unicode_errors="replace")
_pack = _packer.pack
_OUTPUTS, _NAME, _DATATYPE, _SHAPE, _DATA = map(_pack, ("outputs", "name", "datatype", "shape", "data"))


def parse_msgpack_request(
    model_name: str,
    model_version: str,
    body: bytes | bytearray | memoryview,
    limits: RequestLimits = DEFAULT_LIMITS,
    find_region: FindRegion = no_regions,
) -> InferRequest:
    """The request in `body`. Raises WeirError: INVALID_ARG for what is not msgpack, else as `parse_infer_request`."""
    return read_document(model_name, model_version, msgpack_document(body, limits), _NOTHING, limits, find_region)


def build_msgpack_response(
    request: InferRequest,
    response: InferResponse,
    labels: Labels | None = None,
    batching: bool = False,
    written: Mapping[str, Tensor] | None = None,
) -> list[bytes | memoryview]:
    """The chunks of the body that answers `request`: the content of outputs is not copied.

    Which outputs, and what of them, is as in `build_infer_response`, but that all come as bytes. Raises WeirError for
    an output that cannot be written in the requested form, TypeError for content that is still a reference.
    """
    requested = {output.name: output for output in request.outputs}
    outputs = [tensor for tensor in response.outputs if not requested or tensor.name in requested]
    head: dict[str, Any] = {"id": request.id} if request.id else {}
    head["model_name"] = response.model_name
    head["model_version"] = response.model_version
    if response.parameters:
        head["parameters"] = response.parameters
    piece = _packer.pack_map_header(len(head) + 1) + b"".join(_pack(item) for pair in head.items() for item in pair)
    piece += _OUTPUTS + _packer.pack_array_header(len(outputs))
    chunks: list[bytes | memoryview] = []
    for tensor in outputs:
        wanted = requested.get(tensor.name)
        if wanted is not None and wanted.class_count:
            done = written.get(tensor.name) if written else None
            tensor = done or classify(tensor, wanted.class_count, batching, labels(tensor.name) if labels else None)
        is_elsewhere = wanted is not None and wanted.region is not None  # the caller finds the content there
        piece += _packer.pack_map_header(3 if is_elsewhere else 4) + _NAME + _pack(tensor.name)
        piece += _DATATYPE + _pack(tensor.datatype) + _SHAPE + _pack(tensor.shape)
        if is_elsewhere:
            continue
        data = tensor.data
        if isinstance(data, tuple):
            raise TypeError(f"the content of output '{tensor.name}' has not been fetched")
        chunks += (piece + _DATA + bin_header(len(data)), data)
        piece = b""
    return [*chunks, piece] if piece else chunks


def msgpack_error_body(message: str) -> bytes:
    """The body of an error."""
    return bytes(_pack({"error": message}))


def msgpack_document(body: bytes | bytearray | memoryview, limits: RequestLimits) -> Any:
    """The document in `body`. Raises WeirError (INVALID_ARG) for what is not msgpack, or holds too many values."""
    try:
        # An array of a million elements is nine bytes, unless they follow: nothing is made before all of it is there.
        unpacker = _fed(body)
        unpacker.skip()
        if unpacker.tell() != len(body):
            raise invalid("failed to parse the request msgpack: more than one value")
        if len(body) > limits.json_values:
            _check_size(body, limits)
        return msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException) as error:
        raise invalid(f"failed to parse the request msgpack: {_reason(error)}") from None


def _check_size(body: bytes | bytearray | memoryview, limits: RequestLimits) -> None:
    """Refuses a body, which is one value, that is too large without the content of its tensors."""
    view = memoryview(body)
    envelope_bytes = len(view)
    unpacker = _fed(body)
    for _ in range(_count(unpacker.read_map_header(), limits) if _is_map(view[0]) else 0):
        unpacker.skip()
        end = unpacker.tell()
        if bytes(view[end - 6 : end]) != b"inputs" or not _is_array(view[end]):
            unpacker.skip()
            continue
        inputs = unpacker.read_array_header()
        if inputs > limits.tensors:
            raise invalid(f"request holds more than {limits.tensors} inputs")
        for _ in range(inputs):
            envelope_bytes -= _bin_bytes(unpacker, view, limits)
    if envelope_bytes > limits.json_values:
        raise _too_many_values(limits)


def _count(members: int, limits: RequestLimits) -> int:
    if members > limits.json_values // 2:  # each has a name and a value
        raise _too_many_values(limits)
    return members


def _too_many_values(limits: RequestLimits) -> WeirError:
    return invalid(f"request msgpack holds more than {limits.json_values} bytes besides the content of its tensors")


def _bin_bytes(unpacker: msgpack.Unpacker, view: memoryview, limits: RequestLimits) -> int:
    """Bytes of `bin` among the values of the map that comes next."""
    if not _is_map(view[unpacker.tell()]):
        unpacker.skip()
        return 0
    found = 0
    for _ in range(_count(unpacker.read_map_header(), limits)):
        unpacker.skip()
        start = unpacker.tell()
        unpacker.skip()
        header_bytes = _BIN_HEADER_SIZES.get(view[start])
        if header_bytes:
            found += unpacker.tell() - start - header_bytes
    return found


def _fed(body: bytes | bytearray | memoryview) -> msgpack.Unpacker:
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(body)))
    unpacker.feed(body)
    return unpacker


def _is_map(first: int) -> bool:
    return 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)


def _is_array(first: int) -> bool:
    return 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)


def _reason(error: Exception) -> str:
    if isinstance(error, msgpack.OutOfData):
        return "incomplete input"
    if isinstance(error, msgpack.StackError):
        return "too deeply nested"
    if isinstance(error, UnicodeDecodeError):
        return "Invalid encoding in string."
    return str(error) or "not msgpack"

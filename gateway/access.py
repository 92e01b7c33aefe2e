"""`Access`: which groups of calls require a key, and which headers of a request are forwarded to models as parameters.

Source: Triton's `--http-restricted-api`, `--grpc-restricted-protocol`, `--http-header-forward-pattern` and
`--grpc-header-forward-pattern`. The options are compiled once; an option that is not set costs a request nothing.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping, Sequence

from weir.gateway.settings import GatewaySettings
from weir.schemas.core.errors import WeirError, invalid
from weir.schemas.core.requests import Parameters

CATEGORIES = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)
"""The groups of calls that can be restricted, by Triton's names."""

GRPC_KEY_PREFIX = "triton-grpc-protocol-"
"""The prefix of a restriction's key in the metadata of a gRPC call."""

Headers = Iterable[tuple[bytes, bytes]]

_RESERVED = frozenset(
    ["sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"]
)

_CREDENTIALS = frozenset(["authorization", "proxy-authorization", "cookie"])

_MODEL = r"/v2/models/[^/]+(?:/versions/[0-9]+)?"
_CATEGORY_OF_PATH = [
    (re.compile(pattern, re.DOTALL), category)
    for pattern, category in [
        (r"/v2", "metadata"),
        (r"/openapi\.json|/docs(?:/.*)?", "metadata"),
        (r"/v2/health/.*", "health"),
        (r"/v2/logging", "logging"),
        (r"/v2/trace/.*", "trace"),
        (r"/v2/repository/.*", "model-repository"),
        (r"/v2/(?:system|cuda)sharedmemory/.*", "shared-memory"),
        (r"/v2/models/stats", "statistics"),  # as Triton routes it, whatever models there are
        (_MODEL, "metadata"),
        (_MODEL + "/ready", "health"),
        (_MODEL + "/config", "model-config"),
        (_MODEL + "/stats", "statistics"),
        (_MODEL + "/(?:traffic|history|rollback)(?:/.*)?", "model-repository"),
        (_MODEL + "/trace/.*", "trace"),
        (_MODEL + "/(?:infer|generate|generate_stream)", "inference"),
        (r"/v2/jobs(?:/.*)?", "inference"),
    ]
]

_CATEGORY_OF_METHOD = {
    "ServerLive": "health",
    "ServerReady": "health",
    "ModelReady": "health",
    "Check": "health",
    "ServerMetadata": "metadata",
    "ModelMetadata": "metadata",
    "ModelInfer": "inference",
    "ModelStreamInfer": "inference",
    "ModelConfig": "model-config",
    "ModelStatistics": "statistics",
    "TraceSetting": "trace",
    "LogSettings": "logging",
    "GetTraffic": "model-repository",
    "SetTraffic": "model-repository",
    "ClearTraffic": "model-repository",
}
_CATEGORY_OF_METHOD_START = {
    "Repository": "model-repository",
    "SystemSharedMemory": "shared-memory",
    "CudaSharedMemory": "shared-memory",
}


class Restriction:
    """A header that requests must carry with a certain value. `key` is its name as it was configured."""

    __slots__ = ("_name", "_value", "key")

    def __init__(self, key: str, value: str) -> None:
        self.key = key
        self._name = key.lower().encode()
        self._value = value.encode()

    def admits(self, headers: Headers) -> bool:
        """Whether the first header of that name (in lower case in `headers`) has the value; in constant time."""
        for name, value in headers:
            if name == self._name:
                return hmac.compare_digest(value, self._value)
        return False


class Access:
    """Restrictions and forwarded headers. `http` and `grpc` hold the restriction of each restricted category."""

    __slots__ = ("_grpc_forward", "_hidden", "_http_forward", "grpc", "http")

    def __init__(
        self,
        http_restricted: Sequence[str] = (),
        grpc_restricted: Sequence[str] = (),
        http_forward_pattern: str = "",
        grpc_forward_pattern: str = "",
        hides_credentials: bool = False,
    ) -> None:
        """Compiles the options. Raises WeirError (INVALID_ARG) for a malformed one.

        With `hides_credentials` the header Authorization is not forwarded, whatever the patterns: models are not to see
        the keys with which clients prove who they are.
        """
        self._hidden = _CREDENTIALS if hides_credentials else frozenset()
        self.http = _restrictions("http-restricted-api", http_restricted, "")
        self.grpc = _restrictions("grpc-restricted-protocol", grpc_restricted, GRPC_KEY_PREFIX)
        self._http_forward = _pattern("http-header-forward-pattern", http_forward_pattern)
        self._grpc_forward = _pattern("grpc-header-forward-pattern", grpc_forward_pattern)

    @classmethod
    def of(cls, settings: GatewaySettings) -> Access:
        """The rules in the settings of a gateway. Raises WeirError (INVALID_ARG) for a malformed option."""
        return cls(
            settings.http_restricted_api,
            settings.grpc_restricted_protocol,
            settings.http_header_forward_pattern,
            settings.grpc_header_forward_pattern,
            hides_credentials=bool(settings.access_policy),
        )

    # Restrictions

    def is_open(self, category: str) -> bool:
        """Whether everybody may make the calls of the category, over HTTP and gRPC."""
        return category not in self.http and category not in self.grpc

    def http_rejection(self, path: str, headers: Headers) -> str:
        """The reason to answer a request for `path`, without its query, with 403; "" if it is admitted."""
        if not self.http:
            return ""
        restriction = self.http.get(_category_of_path(path))
        if restriction is None or restriction.admits(headers):
            return ""
        return f"This API is restricted, expecting header '{restriction.key}'"

    def rejects_inference(self, headers: Headers) -> bool:
        """Whether a request on an infer route is to be answered with 403."""
        restriction = self.http.get("inference")
        return restriction is not None and not restriction.admits(headers)

    def grpc_rejection(self, path: bytes, headers: Headers) -> str:
        """The reason to answer a call of the method at `path` with UNAVAILABLE; "" if it is admitted."""
        if not self.grpc:
            return ""
        restriction = self.grpc.get(_category_of_method(path))
        if restriction is None or restriction.admits(headers):
            return ""
        return f"This protocol is restricted, expecting header '{restriction.key}'"

    # Forwarded headers

    @property
    def forwards_http(self) -> bool:
        """Whether any headers of HTTP requests are forwarded."""
        return self._http_forward is not None

    def http_parameters(self, headers: Headers) -> Parameters:
        """Request parameters from the headers of an HTTP request, with their names as the client wrote them.

        Raises WeirError (INVALID_ARG) for a header that must not be forwarded.
        """
        return _forwarded(self._http_forward, headers, self._hidden)

    def grpc_parameters(self, headers: Headers) -> Parameters:
        """As `http_parameters`, for the metadata of a gRPC call."""
        return _forwarded(self._grpc_forward, headers, self._hidden)


def add_parameters(own: Parameters | None, forwarded: Parameters) -> Parameters:
    """The parameters of a request together with forwarded headers; a header wins, as in Triton."""
    return {**own, **forwarded} if own else dict(forwarded)


def _restrictions(option: str, values: Sequence[str], prefix: str) -> Mapping[str, Restriction]:
    restrictions: dict[str, Restriction] = {}
    for value in values:
        names, colon, pair = value.partition(":")
        key, equals, secret = pair.partition("=")
        if not (colon and equals and key.strip() and secret):
            raise invalid(f"--{option} must have the form <category,...>:<key>=<value>")
        restriction = Restriction(prefix + key.strip(), secret)
        for name in names.split(","):
            category = name.strip()
            if category not in CATEGORIES:
                raise invalid(f"--{option}: unknown category '{category}'; expected one of {', '.join(CATEGORIES)}")
            if category in restrictions:
                raise invalid(f"--{option}: category '{category}' can not be specified in multiple config groups")
            restrictions[category] = restriction
    return restrictions


def _pattern(option: str, text: str) -> re.Pattern[str] | None:
    if not text:
        return None
    # Python, unlike RE2, can't switch a flag off for the whole pattern.
    flags, text = (0, text[5:]) if text.startswith("(?-i)") else (re.IGNORECASE, text)
    try:
        return re.compile(text, flags)
    except re.error as error:
        raise invalid(f"--{option} is no regular expression: {error}") from None


def _forwarded(pattern: re.Pattern[str] | None, headers: Headers, hidden: frozenset[str]) -> Parameters:
    parameters: Parameters = {}
    if pattern is None:
        return parameters
    for raw_name, raw_value in headers:
        name = raw_name.decode("latin-1")
        if pattern.search(name) and name.lower() not in hidden:
            if name.lower() in _RESERVED or name.lower().startswith("triton_"):
                raise _reserved(name)
            parameters[name] = _text(raw_value)
    return parameters


def _reserved(name: str) -> WeirError:
    return invalid(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _category_of_path(path: str) -> str:
    path = path.removesuffix("\n")  # Starlette's routes end with `$`, which also matches before a trailing newline
    return next((category for pattern, category in _CATEGORY_OF_PATH if pattern.fullmatch(path)), "")


def _category_of_method(path: bytes) -> str:
    method = path.decode("latin-1").rpartition("/")[2]
    start = next((start for start in _CATEGORY_OF_METHOD_START if method.startswith(start)), "")
    return _CATEGORY_OF_METHOD_START[start] if start else _CATEGORY_OF_METHOD.get(method, "")


OPEN = Access()
"""No restrictions, nothing forwarded."""

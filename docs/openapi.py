"""The HTTP API as an OpenAPI 3.1 document, made from the gateway's route table: `docs/reference/openapi.json`.

Each route needs an entry in `OPERATIONS`; `document` raises KeyError for one without.
Source: KServe v2 and Triton's extensions for the routes that are theirs; OpenAPI 3.1 for the document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import MagicMock

from gateway.http.app import make_app
from schemas.core.errors import ErrorCode
from schemas.core.tensors import DATATYPES


class Operation(NamedTuple):
    """One operation: its tag, a summary, the names of its request and response schemas, and its statuses."""

    tag: str
    summary: str
    request: str = ""
    response: str = ""
    status: int = 200


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/v2"): Operation("server", "Server metadata: name, version, extensions, durability", "", "ServerMetadata"),
    ("GET", "/v2/health/live"): Operation("server", "Whether the gateway is running"),
    ("GET", "/v2/health/ready"): Operation("server", "Whether the server and all its models are ready"),
    ("GET", "/v2/models/stats"): Operation("statistics", "Statistics of all models", "", "Statistics"),
    ("GET", "{model}"): Operation("models", "Model metadata", "", "ModelMetadata"),
    ("GET", "{model}/ready"): Operation("models", "Whether the model is ready"),
    ("GET", "{model}/config"): Operation("models", "The model's configuration", "", "ModelConfig"),
    ("GET", "{model}/stats"): Operation("statistics", "Statistics of one model", "", "Statistics"),
    ("POST", "{model}/infer"): Operation("inference", "Run the model", "InferRequest", "InferResponse"),
    ("POST", "{model}/generate"): Operation("inference", "Run the model with plain JSON", "Generate", "Generate"),
    ("POST", "{model}/generate_stream"): Operation(
        "inference", "Run the model and stream its responses as server-sent events", "Generate", "Events"
    ),
    ("POST", "/v2/repository/index"): Operation("repository", "All models of the repositories", "Index", "IndexRows"),
    ("POST", "/v2/repository/{repository}/index"): Operation(
        "repository", "As /v2/repository/index", "Index", "IndexRows"
    ),
    ("POST", "/v2/repository/models/{model}/load"): Operation("repository", "Load or reload a model", "Load"),
    ("POST", "/v2/repository/models/{model}/unload"): Operation("repository", "Unload a model", "Unload"),
    ("POST", "/v2/repository/{repository}/models/{model}/load"): Operation(
        "repository", "Not supported: a repository cannot be chosen", "Load", "Error", 501
    ),
    ("POST", "/v2/repository/{repository}/models/{model}/unload"): Operation(
        "repository", "Not supported: a repository cannot be chosen", "Unload", "Error", 501
    ),
    ("GET", "/v2/logging"): Operation("settings", "Log settings", "", "Settings"),
    ("POST", "/v2/logging"): Operation("settings", "Change log settings", "Settings", "Settings"),
    ("GET", "{model}/traffic"): Operation("traffic", "How requests are split among versions", "", "Traffic"),
    ("PUT", "{model}/traffic"): Operation("traffic", "Split requests among versions", "TrafficRule", "Traffic"),
    ("DELETE", "{model}/traffic"): Operation("traffic", "Remove the rule that was set", "", "Traffic"),
    ("POST", "{model}/traffic/ramp"): Operation("traffic", "Raise the share of a version by steps", "Ramp", "Traffic"),
    ("GET", "{model}/traffic/shadow"): Operation(
        "traffic", "How responses of copies differ from the live ones", "", "ShadowReport"
    ),
    ("GET", "{model}/traffic/shadow/{sample}"): Operation(
        "traffic", "A request whose copy gave another response", "", "ShadowSample"
    ),
    ("PUT", "{model}/traffic/shadow"): Operation("traffic", "Run copies of requests on a version", "Shadow", "Traffic"),
    ("DELETE", "{model}/traffic/shadow"): Operation("traffic", "Make no more copies", "", "Traffic"),
    ("GET", "{model}/history"): Operation("traffic", "The last changes of the model, newest first", "", "History"),
    ("POST", "{model}/rollback"): Operation("traffic", "Undo the last change of the model", "", "Rollback"),
    ("GET", "/v2/trace/setting"): Operation("settings", "Trace settings", "", "Settings"),
    ("POST", "/v2/trace/setting"): Operation("settings", "Change trace settings", "Settings", "Settings"),
    ("GET", "/v2/models/{model}/trace/setting"): Operation("settings", "Trace settings of a model", "", "Settings"),
    ("POST", "/v2/models/{model}/trace/setting"): Operation(
        "settings", "Change trace settings of a model", "Settings", "Settings"
    ),
    ("POST", "/v2/jobs"): Operation("jobs", "Start a batch job", "JobSpec", "Job", 202),
    ("GET", "/v2/jobs"): Operation("jobs", "List batch jobs", "", "Jobs"),
    ("GET", "/v2/jobs/batch-{rest}"): Operation("jobs", "State of a batch job", "", "Job"),
    ("DELETE", "/v2/jobs/batch-{rest}"): Operation("jobs", "Forget a batch job", "", "", 204),
    ("GET", "/v2/jobs/batch-{rest}/result"): Operation("jobs", "Results of items that were sent along, as JSON Lines"),
    ("POST", "/v2/jobs/batch-{rest}/cancel"): Operation("jobs", "Cancel a batch job", "", "Job"),
    ("POST", "/v2/jobs/batch-{rest}/pause"): Operation("jobs", "Pause a batch job", "", "Job"),
    ("POST", "/v2/jobs/batch-{rest}/resume"): Operation("jobs", "Resume a batch job", "", "Job"),
    ("POST", "/v2/jobs/batch-{rest}/retry"): Operation("jobs", "Run the failed items again", "", "Job"),
    ("GET", "/v2/jobs/{id}"): Operation("asynchronous requests", "State of a request", "", "AsyncRequest"),
    ("GET", "/v2/jobs/{id}/result"): Operation("asynchronous requests", "Its response", "", "InferResponse"),
    ("POST", "/v2/jobs/{id}/cancel"): Operation("asynchronous requests", "Cancel a request", "", "AsyncRequest"),
    ("DELETE", "/v2/jobs/{id}"): Operation("asynchronous requests", "Cancel and forget a request", "", "", 204),
    **{
        ("GET", f"/v2/{kind}sharedmemory{region}/status"): Operation(
            "shared memory", f"Registered regions of {kind} shared memory", "", "Regions"
        )
        for kind in ("system", "cuda")
        for region in ("", "/region/{region}")
    },
    **{
        ("POST", f"/v2/{kind}sharedmemory{region}/unregister"): Operation(
            "shared memory", f"Unregister {kind} shared memory"
        )
        for kind in ("system", "cuda")
        for region in ("", "/region/{region}")
    },
    **{
        ("POST", f"/v2/{kind}sharedmemory/region/{{region}}/register"): Operation(
            "shared memory", f"Register {kind} shared memory", f"{kind.title()}Region"
        )
        for kind in ("system", "cuda")
    },
}
"""By method and path. `{model}` at the beginning stands for a model's path, without and with a version."""

_MODEL_PATH = re.compile(r"^/v2/models/\{model\}(/versions/\{version\})?(?!/trace)")


def without_version(path: str) -> str:
    """The path as `OPERATIONS` has it: `{model}` for a model's path with or without a version."""
    return _MODEL_PATH.sub("{model}", path)


def routes() -> Iterator[tuple[str, str]]:
    """(method, path in OpenAPI's form) of each route that does not reject the method."""
    context = MagicMock()
    context.access.http = ()
    for route in make_app(context).routes:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)
        if path.endswith("/infer") and "POST" not in route.methods:
            continue  # answers 405 to every other method
        yield from ((method, path) for method in sorted(route.methods - {"HEAD"}))


def document() -> dict[str, Any]:
    """The OpenAPI document. Raises KeyError for a route that `OPERATIONS` lacks."""
    paths: dict[str, dict[str, Any]] = {}
    for method, path in routes():
        operation = OPERATIONS[method, without_version(path)]
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Weir HTTP API",
            "version": "2",
            "description": "KServe v2 with Triton's extensions, asynchronous requests and batch jobs.",
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://localhost:8000"}],
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": SCHEMAS},
    }


def _operation(method: str, path: str, operation: Operation) -> dict[str, Any]:
    name = re.sub(r"\W+", "_", f"{method.lower()}{path.removeprefix('/v2')}").strip("_")
    made: dict[str, Any] = {"operationId": name, "summary": operation.summary, "tags": [operation.tag]}
    parameters = [
        {"name": found, "in": "path", "required": True, "schema": {"type": "string"}}
        for found in re.findall(r"\{(\w+)\}", path)
    ]
    if path.endswith("/infer"):
        parameters += HEADERS
    if parameters:
        made["parameters"] = parameters
    if operation.request:
        made["requestBody"] = {"content": _content(operation.request, method == "POST" and path.endswith("/infer"))}
    response: dict[str, Any] = {"description": operation.summary}
    if operation.response == "Events":
        response["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    elif operation.response:
        response["content"] = _content(operation.response, operation.response == "InferResponse")
    made["responses"] = {str(operation.status): response}
    if path.endswith("/infer"):
        made["responses"]["202"] = {
            "description": "With `Prefer: respond-async`: stored, to be run later",
            "content": _content("AsyncRequest"),
        }
    if operation.status < 400:
        made["responses"]["default"] = {"description": "An error", "content": _content("Error")}
    return made


def _content(schema: str, is_binary: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    if is_binary:
        content["application/octet-stream"] = {
            "schema": {
                "type": "string",
                "format": "binary",
                "description": "JSON of `Inference-Header-Content-Length` bytes, followed by binary tensors",
            }
        }
    return content


def _header(name: str, text: str, kind: str = "string") -> dict[str, Any]:
    return {"name": name, "in": "header", "description": text, "schema": {"type": kind}}


HEADERS = [
    _header("Inference-Header-Content-Length", "Bytes of JSON before the binary tensors", "integer"),
    _header("Weir-Deadline-Ms", "Unix time in milliseconds after which the request is not run", "integer"),
    _header("Prefer", "`respond-async`: store the request, answer 202, and run it later"),
    _header("Idempotency-Key", "With `Prefer: respond-async`: the same key stores the request once"),
    _header("traceparent", "The caller's trace (W3C)"),
]
"""Headers of the infer route that clients set."""


def _object(required: str = "", **properties: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        made["required"] = required.split()
    return made


def _array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


TEXT = {"type": "string"}
INTEGER = {"type": "integer"}
NUMBER = {"type": "number"}
SHAPE = _array(INTEGER)
ANY_OBJECT = {"type": "object", "additionalProperties": True}
DATATYPE = {"type": "string", "enum": sorted(DATATYPES)}

_REQUESTED = _object("name", name=TEXT, parameters=ANY_OBJECT)
_INPUT = _object("name shape datatype", name=TEXT, shape=SHAPE, datatype=DATATYPE, parameters=ANY_OBJECT, data={})
_OUTPUT = _object("name shape datatype", name=TEXT, shape=SHAPE, datatype=DATATYPE, parameters=ANY_OBJECT, data={})
_TENSOR = _object("name datatype shape", name=TEXT, datatype=DATATYPE, shape=SHAPE)

SCHEMAS: dict[str, Any] = {
    "Error": _object("error", error={**TEXT, "description": "What was wrong"}),
    "ServerMetadata": _object("name version extensions", name=TEXT, version=TEXT, extensions=_array(TEXT)),
    "ModelMetadata": _object(
        "name versions platform inputs outputs",
        name=TEXT,
        versions=_array(TEXT),
        platform=TEXT,
        inputs=_array(_TENSOR),
        outputs=_array(_TENSOR),
    ),
    "ModelConfig": {**ANY_OBJECT, "description": "`config.pbtxt` as JSON, completed"},
    "Statistics": _object("model_stats", model_stats=_array(ANY_OBJECT)),
    "InferRequest": _object(
        "inputs", id=TEXT, parameters=ANY_OBJECT, inputs=_array(_INPUT), outputs=_array(_REQUESTED)
    ),
    "InferResponse": _object(
        "model_name model_version outputs",
        id=TEXT,
        model_name=TEXT,
        model_version=TEXT,
        parameters=ANY_OBJECT,
        outputs=_array(_OUTPUT),
    ),
    "Generate": {**ANY_OBJECT, "description": "Inputs or outputs by name"},
    "Index": _object(ready={"type": "boolean"}),
    "IndexRows": _array(_object("name", name=TEXT, version=TEXT, state=TEXT, reason=TEXT)),
    "Load": _object(parameters={**ANY_OBJECT, "description": "`config` (JSON) and `file:<path>` (base64)"}),
    "Unload": _object(parameters=_object(unload_dependents={"type": "boolean"})),
    "Shadow": _object("version share", version=INTEGER, share=NUMBER, compare={"type": "boolean"}),
    "ShadowReport": _object("model versions worst", model=TEXT, versions=_array(ANY_OBJECT), worst=_array(ANY_OBJECT)),
    "ShadowSample": _object(
        "request_id at_ms inputs live copy",
        request_id=TEXT,
        at_ms=INTEGER,
        inputs=_array(ANY_OBJECT),
        live=_array(ANY_OBJECT),
        copy=_array(ANY_OBJECT),
    ),
    "Ramp": _object("version over_s", version=INTEGER, to=NUMBER, over_s=NUMBER, abort_if=TEXT),
    "History": _object("model changes", model=TEXT, changes=_array(ANY_OBJECT)),
    "Rollback": _object("model undone", model=TEXT, undone=ANY_OBJECT),
    "TrafficRule": _object(
        "weights", weights={**ANY_OBJECT, "description": 'weights by version, as {"1": 90, "2": 10}'}, sticky=TEXT
    ),
    "Traffic": _object(
        "model source weights sticky versions",
        model=TEXT,
        source=TEXT,
        weights=ANY_OBJECT,
        sticky=TEXT,
        versions=_array(ANY_OBJECT),
        changed_ms=INTEGER,
        by=TEXT,
        ramp=ANY_OBJECT,
        shadow=ANY_OBJECT,
    ),
    "Settings": ANY_OBJECT,
    "Regions": _array(ANY_OBJECT),
    "SystemRegion": _object("key byte_size", key=TEXT, offset=INTEGER, byte_size=INTEGER),
    "CudaRegion": _object(
        "raw_handle device_id byte_size",
        raw_handle=_object("b64", b64=TEXT),
        device_id=INTEGER,
        byte_size=INTEGER,
    ),
    "AsyncRequest": _object(
        "id model status",
        id=TEXT,
        model=TEXT,
        version=TEXT,
        status={
            "type": "string",
            "enum": ["queued", "running", "succeeded", "failed", "expired", "cancelled", "dead-lettered"],
        },
        accepted=TEXT,
        ended=TEXT,
        attempts=INTEGER,
        history=_array(ANY_OBJECT),
        result=TEXT,
        error=TEXT,
    ),
    "JobSpec": _object(
        "model input output",
        model=TEXT,
        version=TEXT,
        input=_array(TEXT),
        output=TEXT,
        input_format={"type": "string", "enum": ["jsonl", "npy", "parquet", "files"]},
        output_format={"type": "string", "enum": ["jsonl", "npz", "parquet"]},
        priority=INTEGER,
        max_in_flight=INTEGER,
        max_failures=INTEGER,
    ),
    "Job": {**ANY_OBJECT, "description": "State and counts of a batch job"},
    "Jobs": _object(jobs=_array({"$ref": "#/components/schemas/Job"})),
}
"""By name, as `OPERATIONS` names them."""


def endpoints() -> str:
    """A Markdown table of the operations, by tag."""
    found: dict[str, list[str]] = {}
    for method, path in routes():
        operation = OPERATIONS[method, without_version(path)]
        if "{version}" not in path:
            has_version = (method, path.replace("{model}", "{model}/versions/{version}", 1)) in set(routes())
            shown = path.replace("{model}", "{model}[/versions/{version}]", 1) if has_version else path
            found.setdefault(operation.tag, []).append(f"| {method} | `{shown}` | {operation.summary} |")
    parts = [
        f"## {tag.capitalize()}\n\n| method | path | what |\n| --- | --- | --- |\n" + "\n".join(rows)
        for tag, rows in found.items()
    ]
    return "\n\n".join(parts)


def errors() -> str:
    """A Markdown table of the error codes with their statuses."""
    rows = [
        f"| `{code.name}` | {code.http_status} | {code.grpc_status} | {'yes' if code.retryable else 'no'} |"
        for code in ErrorCode
    ]
    return "| code | HTTP | gRPC | may succeed when repeated |\n| --- | --- | --- | --- |\n" + "\n".join(rows)

"""JSON Schemas of the bodies of the HTTP API, by the names that `OPERATIONS` uses."""

from __future__ import annotations

from typing import Any

from weir.schemas.core.tensors import DATATYPES


def object_of(required: str = "", /, **properties: Any) -> dict[str, Any]:
    """An object with these properties, of which those in `required` (separated by spaces) must be there."""
    made: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        made["required"] = required.split()
    return made


def array_of(items: Any) -> dict[str, Any]:
    """An array of `items`."""
    return {"type": "array", "items": items}


TEXT = {"type": "string"}
INTEGER = {"type": "integer"}
NUMBER = {"type": "number"}
SHAPE = array_of(INTEGER)
ANY_OBJECT = {"type": "object", "additionalProperties": True}
DATATYPE = {"type": "string", "enum": sorted(DATATYPES)}

_REQUESTED = object_of("name", name=TEXT, parameters=ANY_OBJECT)
_INPUT = object_of("name shape datatype", name=TEXT, shape=SHAPE, datatype=DATATYPE, parameters=ANY_OBJECT, data={})
_OUTPUT = object_of("name shape datatype", name=TEXT, shape=SHAPE, datatype=DATATYPE, parameters=ANY_OBJECT, data={})
_TENSOR = object_of("name datatype shape", name=TEXT, datatype=DATATYPE, shape=SHAPE)

SCHEMAS: dict[str, Any] = {
    "Error": object_of("error", error={**TEXT, "description": "What was wrong"}),
    "OpenApi": {**ANY_OBJECT, "description": "An OpenAPI 3.1 document"},
    "ServerMetadata": object_of("name version extensions", name=TEXT, version=TEXT, extensions=array_of(TEXT)),
    "ModelMetadata": object_of(
        "name versions platform inputs outputs",
        name=TEXT,
        versions=array_of(TEXT),
        platform=TEXT,
        inputs=array_of(_TENSOR),
        outputs=array_of(_TENSOR),
    ),
    "ModelConfig": {**ANY_OBJECT, "description": "`config.pbtxt` as JSON, completed"},
    "Statistics": object_of("model_stats", model_stats=array_of(ANY_OBJECT)),
    "InferRequest": object_of(
        "inputs", id=TEXT, parameters=ANY_OBJECT, inputs=array_of(_INPUT), outputs=array_of(_REQUESTED)
    ),
    "InferResponse": object_of(
        "model_name model_version outputs",
        id=TEXT,
        model_name=TEXT,
        model_version=TEXT,
        parameters=ANY_OBJECT,
        outputs=array_of(_OUTPUT),
    ),
    "Generate": {**ANY_OBJECT, "description": "Inputs or outputs by name"},
    "Index": object_of(ready={"type": "boolean"}),
    "IndexRows": array_of(object_of("name", name=TEXT, version=TEXT, state=TEXT, reason=TEXT)),
    "Load": object_of(parameters={**ANY_OBJECT, "description": "`config` (JSON) and `file:<path>` (base64)"}),
    "Unload": object_of(parameters=object_of(unload_dependents={"type": "boolean"})),
    "Shadow": object_of("version share", version=INTEGER, share=NUMBER, compare={"type": "boolean"}),
    "ShadowReport": object_of(
        "model versions worst", model=TEXT, versions=array_of(ANY_OBJECT), worst=array_of(ANY_OBJECT)
    ),
    "ShadowSample": object_of(
        "request_id at_ms inputs live copy",
        request_id=TEXT,
        at_ms=INTEGER,
        inputs=array_of(ANY_OBJECT),
        live=array_of(ANY_OBJECT),
        copy=array_of(ANY_OBJECT),
    ),
    "Ramp": object_of("version over_s", version=INTEGER, to=NUMBER, over_s=NUMBER, abort_if=TEXT),
    "History": object_of("model changes", model=TEXT, changes=array_of(ANY_OBJECT)),
    "Rollback": object_of("model undone now", model=TEXT, undone=ANY_OBJECT, now=ANY_OBJECT),
    "TrafficRule": object_of(
        "weights", weights={**ANY_OBJECT, "description": 'weights by version, as {"1": 90, "2": 10}'}, sticky=TEXT
    ),
    "Traffic": object_of(
        "model source weights sticky versions",
        model=TEXT,
        source=TEXT,
        weights=ANY_OBJECT,
        sticky=TEXT,
        versions=array_of(ANY_OBJECT),
        changed_ms=INTEGER,
        by=TEXT,
        ramp=ANY_OBJECT,
        shadow=ANY_OBJECT,
    ),
    "Settings": ANY_OBJECT,
    "Regions": array_of(ANY_OBJECT),
    "SystemRegion": object_of("key byte_size", key=TEXT, offset=INTEGER, byte_size=INTEGER),
    "CudaRegion": object_of(
        "raw_handle device_id byte_size",
        raw_handle=object_of("b64", b64=TEXT),
        device_id=INTEGER,
        byte_size=INTEGER,
    ),
    "AsyncRequest": object_of(
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
        history=array_of(ANY_OBJECT),
        result=TEXT,
        error=TEXT,
    ),
    "JobSpec": object_of(
        "model input output",
        model=TEXT,
        version=TEXT,
        input=array_of(TEXT),
        output=TEXT,
        input_format={"type": "string", "enum": ["jsonl", "npy", "parquet", "files"]},
        output_format={"type": "string", "enum": ["jsonl", "npz", "parquet"]},
        priority=INTEGER,
        max_in_flight=INTEGER,
        max_failures=INTEGER,
        columns=array_of({"type": "string"}),
    ),
    "Job": {**ANY_OBJECT, "description": "State and counts of a batch job"},
    "Jobs": object_of(jobs=array_of({"$ref": "#/components/schemas/Job"})),
}
"""By name, as `OPERATIONS` names them."""

"""The paths of one model in the OpenAPI document, with the names, datatypes, shapes and labels of its own tensors.

All of it follows from the model's metadata; the limit of batches and the labels are left out where operators restrict the
configuration of models.
"""

from __future__ import annotations

from typing import Any

import orjson

from weir.calls.catalog import ServedModel
from weir.gateway.http.openapi.document import BINARY_TENSORS, EVENTS, HEADERS, TEXTS, content, error_responses
from weir.gateway.http.openapi.operations import OPERATIONS
from weir.gateway.http.openapi.schemas import ANY_OBJECT, TEXT, array_of, object_of
from weir.schemas.config.model_config import ModelConfig, ModelInput, ModelOutput
from weir.schemas.core.errors import WeirError
from weir.schemas.core.names import model_path, namespace_of
from weir.schemas.core.tensors import BY_CONFIG_NAME
from weir.schemas.kserve.sample_inputs import declared_inputs, needs_binary_outputs, sample_body, sample_tensors

MAX_DIMENSIONS = 1024
"""Tensors of one model, and their dimensions, that the document describes; for a larger model it has no paths."""

MAX_LABELS = 20
"""Labels of one output that the document lists."""

_MAX_LABEL_LENGTH = 100

MAX_EXAMPLE_BYTES = 4096
"""The inputs of a request in the document. A model with larger ones has no example."""

_INTEGER_BITS = {"INT8": 8, "INT16": 16, "INT32": 32, "INT64": 64}
_UNSIGNED_BITS = {"UINT8": 8, "UINT16": 16, "UINT32": 32, "UINT64": 64}
_JSON_TYPES = {"BOOL": "boolean", "BYTES": "string"}


def model_tag(served: ServedModel) -> dict[str, Any]:
    """The tag that groups the model's operations."""
    versions = ", ".join(map(str, served.versions))
    config = served.config
    return {"name": served.name, "description": f"Platform {config.platform or config.backend}, versions {versions}"}


def model_paths(served: ServedModel, shows_config: bool = True) -> dict[str, Any]:
    """The model's paths by URL; none for a model with too many tensors, or one that needs its namespace to be named.

    `shows_config` adds what metadata lacks: the largest batch, and labels.
    """
    config = served.config
    tensors: list[ModelInput | ModelOutput] = [*config.input, *config.output]
    if namespace_of(served.name) or len(tensors) + sum(len(tensor.dims) for tensor in tensors) > MAX_DIMENSIONS:
        return {}
    described = _Model(served, shows_config)
    prefix = model_path(served.name)
    if config.is_decoupled:
        return {f"{prefix}/generate_stream": {"post": described.generate_stream()}}
    return {
        f"{prefix}/infer": {"post": described.infer()},
        f"{prefix}/generate": {"post": described.generate()},
    }


class _Model:
    """The operations of one model."""

    def __init__(self, served: ServedModel, shows_config: bool) -> None:
        self._name = served.name
        self._config = served.config
        self._labels = served.labels if shows_config else {}
        self._shows_config = shows_config

    def infer(self) -> dict[str, Any]:
        """POST …/infer."""
        made = self._operation("infer", f"Run {self._name}", self._infer_request(), self._infer_response())
        made["parameters"] = HEADERS
        example = self._example()
        if example is not None:
            made["requestBody"]["content"]["application/json"]["example"] = example
        made["requestBody"]["content"] |= BINARY_TENSORS
        made["responses"]["200"]["content"] |= BINARY_TENSORS
        return made

    def generate(self) -> dict[str, Any]:
        """POST …/generate."""
        summary = f"Run {self._name} with plain JSON"
        made = self._operation("generate", summary, self._generate_request(), self._generate_response())
        return self._with_plain_example(made)

    def generate_stream(self) -> dict[str, Any]:
        """POST …/generate_stream."""
        summary = f"Run {self._name} and stream its responses as server-sent events"
        made = self._operation("generate_stream", summary, self._generate_request(), {})
        made["responses"]["200"]["content"] = TEXTS[EVENTS]
        return self._with_plain_example(made)

    def _example(self) -> dict[str, Any] | None:
        """A request that the model takes; None where it would be long, or can't be written as JSON."""
        try:
            tensors = sample_tensors(declared_inputs(self._config), max_bytes=MAX_EXAMPLE_BYTES)
        except WeirError:
            return None
        is_sequence = self._config.sequence_batching is not None
        body, header_length = sample_body(tensors, is_sequence, needs_binary_outputs(self._config))
        return dict(orjson.loads(body)) if header_length is None else None

    def _with_plain_example(self, operation: dict[str, Any]) -> dict[str, Any]:
        """The operation with the same request in the form of `generate`, which has no sequences."""
        example = self._example()
        if example is not None and self._config.sequence_batching is None:
            plain = {row["name"]: row["data"] if len(row["data"]) != 1 else row["data"][0] for row in example["inputs"]}
            operation["requestBody"]["content"]["application/json"]["example"] = plain
        return operation

    def _operation(self, verb: str, summary: str, request: dict[str, Any], response: dict[str, Any]) -> dict[str, Any]:
        general = OPERATIONS["POST", f"{{model}}/{verb}"]
        return {
            "operationId": f"{verb}_{self._name}",
            "summary": summary,
            "tags": [self._name],
            "requestBody": {"content": content(request), "required": True},
            "responses": {
                "200": {"description": f"The outputs of {self._name}", "content": content(response)},
                **error_responses(general, "{model}"),
            },
        }

    def _infer_request(self) -> dict[str, Any]:
        config = self._config
        inputs = array_of(_one_of([self._tensor(tensor, "data") for tensor in config.input]))
        inputs["minItems"] = sum(not tensor.optional for tensor in config.input)
        inputs["maxItems"] = len(config.input)
        names = [tensor.name for tensor in config.output]
        parameters = object_of(
            binary_data={"type": "boolean", "description": "Return it behind the JSON"},
            classification={
                "type": "integer",
                "minimum": 0,
                "description": "The number of classes to return, with their scores",
            },
        )
        outputs = array_of(object_of("name", name={**TEXT, "enum": names}, parameters=parameters))
        outputs["description"] = "The outputs to return; without this field, all"
        request = object_of("inputs", id=TEXT, parameters=_parameters(config), inputs=inputs, outputs=outputs)
        if config.sequence_batching is not None and not config.sequence_batching.iterative_sequence:
            request["required"].append("parameters")
        return request

    def _infer_response(self) -> dict[str, Any]:
        outputs = array_of(_one_of([self._tensor(tensor) for tensor in self._config.output]))
        return object_of(
            "model_name model_version outputs",
            id=TEXT,
            model_name={"const": self._name},
            model_version=TEXT,
            parameters=ANY_OBJECT,
            outputs=outputs,
        )

    def _tensor(self, tensor: ModelInput | ModelOutput, *required: str) -> dict[str, Any]:
        """One tensor of an infer request or response. `data` is absent where its content is binary, or in a region."""
        datatype = BY_CONFIG_NAME[tensor.data_type].name
        element = _element(datatype)
        is_input = isinstance(tensor, ModelInput)
        made = object_of(
            "name datatype shape",
            name={"const": tensor.name},
            # With `classification`, an output is BYTES of another shape.
            datatype={"const": datatype} if is_input else {**TEXT, "enum": list(dict.fromkeys([datatype, "BYTES"]))},
            shape=self._shape(tensor) if is_input else array_of({"type": "integer", "minimum": 0}),
            parameters=ANY_OBJECT,
            data=array_of({} if not is_input else {"anyOf": [element, {"type": "array"}]}),
        )
        made["title"] = tensor.name
        made["description"] = f"{datatype} {self._shown_shape(tensor)}{self._shown_labels(tensor)}"
        return made

    def _dims(self, tensor: ModelInput | ModelOutput) -> list[int]:
        return [*([-1] if self._config.max_batch_size > 0 else []), *tensor.dims]

    def _shape(self, tensor: ModelInput | ModelOutput) -> dict[str, Any]:
        dims: list[dict[str, Any]] = [
            {"type": "integer", "minimum": 0} if dim == -1 else {"const": dim} for dim in self._dims(tensor)
        ]
        if self._config.max_batch_size > 0:
            dims[0] = {"type": "integer", "minimum": 1}
            if self._shows_config:
                dims[0]["maximum"] = self._config.max_batch_size
        made: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
        return made | {"prefixItems": dims, "minItems": len(dims), "maxItems": len(dims)} if dims else made

    def _shown_shape(self, tensor: ModelInput | ModelOutput) -> str:
        return "[" + ", ".join("any" if dim == -1 else str(dim) for dim in self._dims(tensor)) + "]"

    def _shown_labels(self, tensor: ModelInput | ModelOutput) -> str:
        labels = self._labels.get(tensor.name, [])
        if not labels:
            return ""
        shown = ", ".join(label[:_MAX_LABEL_LENGTH] for label in labels[:MAX_LABELS])
        return f"; {len(labels)} labels: {shown}{', …' if len(labels) > MAX_LABELS else ''}"

    def _generate_request(self) -> dict[str, Any]:
        required = [tensor.name for tensor in self._config.input if not tensor.optional]
        made = object_of(**{tensor.name: self._flat(tensor) for tensor in self._config.input})
        made["description"] = "Inputs by name; any other member is a parameter of the request"
        return made | {"required": required} if required else made

    def _generate_response(self) -> dict[str, Any]:
        made = object_of(**{tensor.name: {} for tensor in self._config.output})
        made["properties"] |= {"model_name": TEXT, "model_version": TEXT}
        made["required"] = ["model_name", "model_version"]
        return made

    def _flat(self, tensor: ModelInput | ModelOutput) -> dict[str, Any]:
        element = _element(BY_CONFIG_NAME[tensor.data_type].name)
        text = f"The elements of shape {self._shown_shape(tensor)} in row-major order; one element may stand alone"
        return {"anyOf": [element, array_of(element)], "description": text}


def _parameters(config: ModelConfig) -> dict[str, Any]:
    """The parameters of a request that the server reads; a model may read others."""
    unsigned = {"type": "integer", "minimum": 0}
    made = object_of(
        priority=unsigned,
        timeout={**unsigned, "description": "Microseconds that the request may wait in the queue"},
        binary_data_output={"type": "boolean", "description": "Return all outputs behind the JSON"},
    )
    if config.sequence_batching is not None:
        identity = {"anyOf": [{"type": "integer", "minimum": 1}, {**TEXT, "minLength": 1}]}
        made["properties"] |= {
            "sequence_id": identity,
            "sequence_start": {"type": "boolean"},
            "sequence_end": {"type": "boolean"},
        }
        if not config.sequence_batching.iterative_sequence:
            made["required"] = ["sequence_id"]
    return made


def _element(datatype: str) -> dict[str, Any]:
    """One element of a tensor in JSON."""
    if datatype in _INTEGER_BITS:
        bound = 1 << (_INTEGER_BITS[datatype] - 1)
        return {"type": "integer", "minimum": -bound, "maximum": bound - 1}
    if datatype in _UNSIGNED_BITS:
        return {"type": "integer", "minimum": 0, "maximum": (1 << _UNSIGNED_BITS[datatype]) - 1}
    return {"type": _JSON_TYPES.get(datatype, "number")}


def _one_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    if not schemas:
        return {}
    return schemas[0] if len(schemas) == 1 else {"oneOf": schemas}

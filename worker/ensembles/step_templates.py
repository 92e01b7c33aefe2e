"""`StepTemplates`: the checked and packed forms of the requests that an ensemble sends to the models of its steps.

The requests of a step mostly differ in the content of their tensors alone. What depends on the rest is checked and packed
once, as in `weir.calls.request_templates`.
"""

from __future__ import annotations

from typing import Any

from weir.bus.payloads.arena import INLINE_LIMIT_BYTES
from weir.calls.catalog import ServedModel
from weir.calls.request_templates import RequestTemplate, without_content
from weir.schemas.core.requests import InferRequest
from weir.schemas.core.tensors import Tensor

MAX_TEMPLATES = 64
"""Templates of one ensemble; when there are more, all are made again."""

Signature = tuple[Any, ...]
"""A step, and the data type, size and shape of each of its inputs."""


class StepTemplates:
    """The templates of one ensemble by signature. A template belongs to a model with one configuration."""

    __slots__ = ("_templates",)

    def __init__(self) -> None:
        self._templates: dict[Signature, tuple[ServedModel, RequestTemplate]] = {}

    def find(self, model: ServedModel, signature: Signature) -> RequestTemplate | None:
        """The template for requests of this signature to the model as it is served now."""
        found = self._templates.get(signature)
        return found[1] if found is not None and found[0] is model else None

    def add(self, model: ServedModel, signature: Signature, request: InferRequest) -> RequestTemplate:
        """Makes a template of a request that the model's normalizer has checked; the request loses its content."""
        if len(self._templates) >= MAX_TEMPLATES:
            self._templates.clear()
        template = RequestTemplate(without_content(request), 0)
        self._templates[signature] = model, template
        return template


def signature_of(step: int, tensors: list[Tensor | None]) -> Signature | None:
    """The signature of a step's request with these inputs (None: absent); None if it can have no template.

    Large tensors and those in shared memory travel as references, and the content of strings must be checked.
    """
    signature: list[Any] = [step]
    for tensor in tensors:
        if tensor is None:
            signature.append(None)
            continue
        data = tensor.data
        if isinstance(data, tuple) or tensor.datatype == "BYTES" or len(data) > INLINE_LIMIT_BYTES:
            return None
        signature += (tensor.datatype, len(data), *tensor.shape)
    return tuple(signature)

"""Requests of steps by templates: the same bytes as without, and which requests have none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.worker.ensembles.test_request import ResponseLog, ensemble, model
from weir.bus.payloads.arena import INLINE_LIMIT_BYTES, PayloadReader
from weir.calls.catalog import ServedModel
from weir.schemas.core.errors import ErrorCode
from weir.schemas.core.requests import InferRequest, InferResponse
from weir.schemas.core.tensors import PayloadRef, Tensor
from weir.schemas.wire.request_body import pack_body
from weir.worker.ensembles.request import EnsembleContext, EnsembleRequest, StepLimiter
from weir.worker.ensembles.run import EnsemblePlan
from weir.worker.ensembles.step_templates import MAX_TEMPLATES, StepTemplates, signature_of


class Client:
    """An `InferenceClient` that keeps the packed requests: `sent` without a template, `by_template` with one."""

    def __init__(self) -> None:
        self.models = {name: ServedModel(name, model(name, 8), [1], {}) for name in "ab"}
        self.catalog = SimpleNamespace(resolve=lambda name, _version: self.models[name])
        self.has_cache = False
        self.sent: list[bytes] = []
        self.by_template: list[tuple[bytes, int]] = []
        self.keys: list[tuple[int, str]] = []  # batch size and shape key of each request
        self.callbacks: list[Any] = []

    def caches(self, _model: ServedModel) -> bool:
        return self.has_cache

    def submit(self, request: InferRequest, on_response: Any) -> Any:
        self.models[request.model_name].normalizer.normalize(request)
        self.keys.append((request.batch_size, request.shape_key))
        self.sent.append(pack_body(request))
        self.callbacks.append(on_response)
        return SimpleNamespace(timestamps=None)

    def submit_template(
        self, _model: ServedModel, template: Any, body: bytes, on_response: Any, deadline_ms: int = 0
    ) -> Any:
        self.keys.append((template.request.batch_size, template.request.shape_key))
        self.by_template.append((body, deadline_ms))
        self.callbacks.append(on_response)
        return SimpleNamespace(timestamps=None)

    def release(self, _ref: PayloadRef) -> None:
        pass


class Ensemble:
    """The ensemble of models `a` and `b`, one after another."""

    def __init__(self) -> None:
        self.client = Client()
        config = ensemble("a", "b", batch=8)
        client: Any = self.client
        self.context = EnsembleContext(config, EnsemblePlan(config), StepLimiter(2, 0), client, PayloadReader())

    def begin(self, content: Any = bytes(12), **fields: Any) -> ResponseLog:
        log = ResponseLog()
        request = InferRequest("e", inputs=[Tensor("IN", "FP32", [1, 3], content)], **fields)
        EnsembleRequest(self.context, request, log).begin()
        return log

    def answer(self, content: bytes) -> None:
        self.client.callbacks.pop(0)(InferResponse("m", "1", "", [Tensor("OUT", "FP32", [1, 3], content)]), True)


def test_requests_by_templates_are_those_without() -> None:
    plain, templated = Ensemble(), Ensemble()
    plain.client.has_cache = True
    for number in range(3):
        for chain in (plain, templated):
            chain.begin(bytes([number]) * 12)
            chain.answer(bytes([number + 10]) * 12)
            chain.answer(bytes(12))
    assert len(plain.client.sent) == 6
    assert templated.client.keys == plain.client.keys
    assert (templated.client.sent, [body for body, _ in templated.client.by_template]) == ([], plain.client.sent)


def test_a_deadline_is_the_requests_own() -> None:
    chain = Ensemble()
    chain.begin(deadline_ms=5)
    chain.begin(deadline_ms=6)
    assert [deadline for _, deadline in chain.client.by_template] == [5, 6]


@pytest.mark.parametrize(
    "fields", [{"id": "me"}, {"parameters": {"a": 1}}, {"priority": 1}, {"timeout_us": 1}, {"correlation_id": 7}]
)
def test_requests_with_more_than_tensors_have_no_template(fields: dict[str, Any]) -> None:
    chain = Ensemble()
    chain.begin(**fields)
    assert (len(chain.client.sent), chain.client.by_template) == (1, [])


def test_a_request_that_does_not_fit_its_model_is_rejected_and_makes_no_template() -> None:
    chain = Ensemble()
    log = chain.begin(bytes(8))
    assert log.ends[0].code is ErrorCode.INVALID_ARG
    chain.begin()
    assert len(chain.client.by_template) == 1


def test_a_template_is_for_one_configuration_of_its_model() -> None:
    chain = Ensemble()
    templates, signature = StepTemplates(), (0, "FP32", 12, 1, 3)
    served, reloaded = chain.client.models["a"], ServedModel("a", model("a", 8), [1], {})
    template = templates.add(served, signature, InferRequest("a", inputs=[Tensor("IN", "FP32", [1, 3], bytes(12))]))
    assert templates.find(served, signature) is template
    assert templates.find(reloaded, signature) is None


def test_the_number_of_templates_is_bounded() -> None:
    templates = StepTemplates()
    served = Ensemble().client.models["a"]
    for number in range(MAX_TEMPLATES + 1):
        templates.add(served, (number,), InferRequest("a", inputs=[Tensor("IN", "FP32", [1], bytes(4))]))
    assert [number for number in range(MAX_TEMPLATES + 1) if templates.find(served, (number,))] == [MAX_TEMPLATES]


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("IN", "BYTES", [1], b"\x01\x00\x00\x00a"),
        Tensor("IN", "UINT8", [INLINE_LIMIT_BYTES + 1], bytes(INLINE_LIMIT_BYTES + 1)),
        Tensor("IN", "UINT8", [1], PayloadRef("weir-w_0.1", 0, 1, 0, 1)),
    ],
)
def test_strings_and_large_tensors_have_no_signature(tensor: Tensor) -> None:
    assert signature_of(0, [tensor]) is None


def test_signatures_tell_steps_types_shapes_and_absent_inputs_apart() -> None:
    one, other = Tensor("IN", "FP32", [1, 4], bytes(16)), Tensor("IN", "FP32", [4, 1], bytes(16))
    integers = Tensor("IN", "INT32", [1, 4], bytes(16))
    given = [(0, [one]), (1, [one]), (0, [other]), (0, [integers]), (0, [one, None]), (0, [None, one]), (0, [one, one])]
    assert len({signature_of(step, tensors) for step, tensors in given}) == len(given)

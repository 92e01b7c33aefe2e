"""`make_requests`: the requests of a load test, checked as the server checks them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from weir.perf.inputs.files import read_requests
from weir.perf.inputs.generated import InputOptions, generate_requests
from weir.perf.inputs.model import InputError, has_text_ids, needs_correlation_id
from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError
from weir.schemas.core.requests import InferRequest
from weir.schemas.kserve.normalizer import RequestNormalizer


def make_requests(model: ModelConfig, options: InputOptions, file: Path | None = None) -> list[InferRequest]:
    """The requests in `file`, or generated ones. They request all outputs as binary data.

    Each has its `batch_size` set. Raises InputError where the model would reject a request.
    """
    requests = generate_requests(model, options) if file is None else read_requests(file, model, options)
    normalizer = RequestNormalizer(model)
    for number, request in enumerate(requests):
        request.binary_default = not request.outputs
        checked = msgspec.structs.replace(request)
        if needs_correlation_id(model):
            checked.correlation_id = "1" if has_text_ids(model) else 1
        try:
            normalizer.normalize(checked)
        except WeirError as error:
            where = f"request {number} of {file}" if file else "a generated request"
            raise InputError(f"{where} does not fit the model: {error.message}") from error
        request.batch_size = checked.batch_size
    return requests

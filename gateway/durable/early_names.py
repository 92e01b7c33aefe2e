"""`kserve_id`: the id in the body of a durable request that is to end before it is read, as its record is to have it."""

from __future__ import annotations

from gateway.durable.bodies import HEADER_LENGTH, parse_body, parse_outline
from gateway.durable.durable_request import DurableRequest
from gateway.durable.intake_parts import IntakeParts
from gateway.durable.request_terms import check_id
from runtime.offload import OFF_LOOP_BYTES
from schemas.errors import WeirError
from schemas.model_config import ModelConfig

_NO_CONFIG = ModelConfig(name="")


def kserve_id(request: DurableRequest, parts: IntakeParts) -> str:
    """The KServe id of a request, "" where there is none that can be read; notes the form of its body.

    Of a long body that no helper process has read there is none: its headers can't be read either.
    """
    content = request.terms.content_headers
    if request.outline is None and len(request.body) > OFF_LOOP_BYTES:
        return ""
    if content.get(HEADER_LENGTH) == "0":
        return ""
    try:
        if request.outline is not None:
            asked, request.format = parse_outline(request.model, "", request.outline, parts.limits, parts.find_region)
        else:
            asked, request.format = parse_body(
                request.model, "", request.body, content, _NO_CONFIG, parts.limits, parts.find_region
            )
        return check_id(asked.id)
    except WeirError:
        return ""

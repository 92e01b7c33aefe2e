"""`infer_body`: a request as the body that HTTP and NATS carry."""

from __future__ import annotations

import msgspec
import orjson

from weir.perf.clients.session import SampleRequest
from weir.schemas.kserve.regions import region_parameters
from weir.schemas.kserve.request import build_infer_request


def infer_body(sample: SampleRequest) -> tuple[list[bytes | memoryview], int]:
    """The chunks of the body, the first of which is JSON, and the length of the JSON.

    Inputs with a place in shared memory are named by it, and their content is left out.
    """
    if not sample.places:
        return build_infer_request(sample.request)
    inputs = [
        msgspec.structs.replace(tensor, data=b"") if tensor.name in sample.places else tensor
        for tensor in sample.request.inputs
    ]
    chunks, _ = build_infer_request(msgspec.structs.replace(sample.request, inputs=inputs))
    document = orjson.loads(chunks[0])
    for row in document["inputs"]:
        if row["name"] in sample.places:
            row["parameters"] = region_parameters(*sample.places[row["name"]])
    chunks[0] = orjson.dumps(document)
    return chunks, len(chunks[0])

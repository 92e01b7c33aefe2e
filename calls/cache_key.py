"""`cache_key`: what two requests have in common whose answers are the same.

Source: Triton hashes the model's name, its version, and the names and bytes of inputs to 64 bits. That leaves out shapes,
datatypes, requested outputs and parameters, all of which an answer may depend on, and two requests of 5 billion collide.
"""

from __future__ import annotations

import hashlib

from schemas.requests import InferRequest
from schemas.wire import pack

KEY_BYTES = 32


def cache_key(model: str, version: int, load: str, request: InferRequest) -> bytes:
    """The key of a request whose inputs' content is here; `load` tells loads of the version apart.

    Not part of it are the request's id, its priority and its timeout, on which an answer does not depend.
    """
    inputs = sorted(request.inputs, key=lambda tensor: tensor.name)
    facts = (
        model,
        version,
        load,
        [(tensor.name, tensor.datatype, list(tensor.shape), tensor.size_bytes) for tensor in inputs],
        [output.name for output in request.outputs],
        sorted((request.parameters or {}).items()),
        request.correlation_id,
        request.sequence_flags,
    )
    # The facts tell where each content ends, so no two requests are the same bytes in a row.
    digest = hashlib.blake2b(pack(facts), digest_size=KEY_BYTES)
    for tensor in inputs:
        digest.update(tensor.data)  # type: ignore[arg-type]
    return digest.digest()

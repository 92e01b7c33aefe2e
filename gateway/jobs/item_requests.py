"""What a job asks for each of its items, and what its answers mean for the job."""

from __future__ import annotations

from copy import copy
from enum import Enum

from gateway.jobs.files.items import JobItem
from gateway.jobs.job_record import JobSpec
from schemas.errors import ErrorCode, WeirError, invalid
from schemas.lanes import Lane
from schemas.requests import InferRequest
from schemas.tensors import Tensor

_NOBODYS_FAULT = (
    "Exceeds maximum queue size",
    "the server is stopping",
    "the message broker is not available",
    "Request for unknown model",
)
"""How errors begin that say nothing of the item."""


class Meaning(Enum):
    """What an error means."""

    FINAL = "final"
    """The item would fail again."""
    AGAIN = "again"
    """It may have been for something that passes; but not any number of times."""
    NOBODYS_FAULT = "nobody's fault"
    """It has nothing to do with the item: nobody serves the model, or there is no room."""


def meaning_of(error: WeirError) -> Meaning:
    """What an error means that came as an item's answer."""
    if not error.retryable:
        return Meaning.FINAL
    return Meaning.NOBODYS_FAULT if error.message.startswith(_NOBODYS_FAULT) else Meaning.AGAIN


def meaning_of_refusal(error: WeirError) -> Meaning:
    """What an error means that was raised when an item was submitted: a model that is not there may come."""
    return Meaning.NOBODYS_FAULT if error.retryable or error.code is ErrorCode.NOT_FOUND else Meaning.FINAL


def request_for(spec: JobSpec, item: JobItem, inputs: list[Tensor]) -> InferRequest:
    """The request for an item. Raises WeirError for one that a job can't ask."""
    # What is submitted is changed on its way, and the item may have to be asked again.
    request = copy(item.request) if item.request is not None else InferRequest(spec.model, id=item.source)
    if request.regions or any(output.region is not None for output in request.outputs):
        raise invalid("shared-memory regions can't be used in a job")
    request.inputs = [Tensor(tensor.name, tensor.datatype, tensor.shape, tensor.data) for tensor in inputs]
    request.model_name, request.model_version = spec.model, spec.version
    if spec.priority:
        request.priority = spec.priority
    request.lane = Lane.BATCH
    return request

"""What a job asks for each of its items, and what its answers mean for the job."""

from __future__ import annotations

from copy import copy
from enum import Enum

from gateway.durable.retry_policy import ErrorClass, Trials, classify_error
from gateway.jobs.files.items import JobItem
from gateway.jobs.job_record import JobSpec
from schemas.errors import ErrorCode, WeirError, invalid
from schemas.lanes import Lane
from schemas.requests import InferRequest
from schemas.tensors import Tensor


class Meaning(Enum):
    """What an error means."""

    FINAL = "final"
    """The item would fail again."""
    AGAIN = "again"
    """It may have been for something that passes; but not any number of times."""
    NOBODYS_FAULT = "nobody's fault"
    """It has nothing to do with the item: nobody serves the model, or there is no room."""


def meaning_of(error: WeirError, request: InferRequest) -> Meaning:
    """What an error means that came as the answer to an item's request: as of durable requests, but never too late."""
    asked = Trials(request.id, 0, names_timeout=request.timeout_us > 0)
    kind = classify_error(0, error, asked)
    if kind is ErrorClass.NOBODYS or kind is ErrorClass.UNKNOWN:
        return Meaning.NOBODYS_FAULT
    return Meaning.AGAIN if kind is ErrorClass.PASSING else Meaning.FINAL


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

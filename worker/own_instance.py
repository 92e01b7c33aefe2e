"""`OwnInstance`: an instance of a user's backend, what it answers held to what can be sent.

What is malformed would be dropped by the gateway, with the answers of the whole message, and whoever waits would do so for
ever. So each result that can't be sent becomes an error, which is its request's alone.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from schemas.datatypes import DATATYPES
from schemas.errors import WeirError, internal
from schemas.requests import InferRequest
from schemas.tensors import Tensor, element_count, unpack_bytes
from worker.backend import Execution, Instance, Pending, Result


class OwnInstance:
    """See the module, and `worker.backend.Instance`. `backend` is the name of the user's."""

    def __init__(self, backend: str, instance: Instance) -> None:
        self._backend = backend
        self._instance = instance

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> Sequence[Result | None] | Pending:
        """See `worker.backend.Instance`."""
        outcomes = self._instance.execute(requests, _CheckedExecution(self._backend, len(requests), execution))
        return _CheckedRun(self._backend, outcomes) if isinstance(outcomes, Pending) else _all(self._backend, outcomes)

    def close(self) -> None:
        """See `worker.backend.Instance`."""
        self._instance.close()


class _CheckedRun(Pending):
    def __init__(self, backend: str, run: Pending) -> None:
        self._backend = backend
        self._run = run

    def results(self) -> Sequence[Result | None]:
        return _all(self._backend, self._run.results())


class _CheckedExecution(Execution):
    """The batch's own execution, to which nothing comes that can't be sent."""

    __slots__ = ("_backend", "_batch", "_count")

    def __init__(self, backend: str, count: int, batch: Execution) -> None:
        super().__init__(batch.reader)
        self._backend = backend
        self._count = count
        self._batch = batch

    # The times of its phases are the batch's.
    @property
    def input_end_ns(self) -> int:
        return self._batch.input_end_ns

    @input_end_ns.setter
    def input_end_ns(self, value: int) -> None:
        if hasattr(self, "_batch"):
            self._batch.input_end_ns = value

    @property
    def infer_end_ns(self) -> int:
        return self._batch.infer_end_ns

    @infer_end_ns.setter
    def infer_end_ns(self, value: int) -> None:
        if hasattr(self, "_batch"):
            self._batch.infer_end_ns = value

    def respond(self, position: int, result: Result | None, is_final: bool) -> None:
        """See `Execution`."""
        self._batch.respond(self._known(position), checked(self._backend, result), is_final)

    def fail(self, error: WeirError) -> None:
        """See `Execution`."""
        failure = checked(self._backend, Result(error=error)) or Result()
        self._batch.fail(failure.error or internal(f"backend '{self._backend}' failed without an error"))

    def is_cancelled(self, position: int) -> bool:
        """See `Execution`."""
        return self._batch.is_cancelled(self._known(position))

    @property
    def has_responded(self) -> bool:
        """See `Execution`."""
        return self._batch.has_responded

    def _known(self, position: int) -> int:
        if not 0 <= position < self._count:
            raise IndexError(f"there is no request {position} in a batch of {self._count}")
        return position


def _all(backend: str, outcomes: Sequence[Result | None]) -> Sequence[Result | None]:
    if not isinstance(outcomes, (list, tuple)):
        raise internal(f"backend '{backend}': expected a list of results, found type '{type(outcomes).__name__}'")
    return [checked(backend, outcome) for outcome in outcomes]


def checked(backend: str, result: Result | None) -> Result | None:
    """The result, or one that says what is wrong with it."""
    problem = "" if result is None else _problem(result)
    return Result(error=internal(f"backend '{backend}': {problem}")) if problem else result


def _problem(result: Result) -> str:
    if not isinstance(result, Result):
        return f"expected a result, found type '{type(result).__name__}'"
    if result.error is not None:
        return "" if isinstance(result.error, WeirError) else f"an error must be a WeirError, found {result.error!r}"
    parameters = result.parameters
    if parameters is not None and not (
        isinstance(parameters, dict)
        and all(type(key) is str and type(value) in (str, int, float, bool) for key, value in parameters.items())
    ):
        return "response parameters must be text, numbers or booleans by name"
    for tensors in (result.outputs, result.states):
        if not isinstance(tensors, (list, tuple)):
            return f"outputs must be a list of tensors, found type '{type(tensors).__name__}'"
        for tensor in tensors:
            if problem := _problem_of(tensor):
                return problem
    return ""


def _problem_of(tensor: Tensor) -> str:
    if not isinstance(tensor, Tensor) or type(tensor.name) is not str:
        return f"outputs must be tensors with names, found {tensor!r:.100}"
    datatype = DATATYPES.get(tensor.datatype) if type(tensor.datatype) is str else None
    if datatype is None:
        return f"output '{tensor.name}' has the unknown datatype {tensor.datatype!r:.100}"
    try:
        tensor.shape = [operator.index(dim) for dim in tensor.shape]
    except TypeError:
        return f"output '{tensor.name}' has no shape but {tensor.shape!r:.100}"
    if any(dim < 0 for dim in tensor.shape):
        return f"output '{tensor.name}' has the shape {tensor.shape}"
    data = tensor.data
    if not isinstance(data, (bytes, bytearray, memoryview, tuple)):
        return f"the content of output '{tensor.name}' must be bytes, found type '{type(data).__name__}'"
    if isinstance(data, memoryview) and (data.ndim != 1 or data.itemsize != 1 or not data.c_contiguous):
        if not data.c_contiguous:
            return f"the content of output '{tensor.name}' does not lie in one piece"
        tensor.data = data = data.cast("B")
    elements = element_count(tensor.shape)
    if tensor.datatype == "BYTES":
        fills = isinstance(data, tuple) or _strings(data) == elements
    else:
        fills = tensor.size_bytes == elements * datatype.size_bytes
    return "" if fills else f"the content of output '{tensor.name}' does not fill its shape {tensor.shape}"


def _strings(data: bytes | memoryview) -> int:
    try:
        return len(unpack_bytes(data))
    except ValueError:
        return -1

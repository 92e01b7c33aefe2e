"""`CachedAnswer`: what a response cache keeps of an answer, and how it travels to a cache that is shared."""

from __future__ import annotations

from typing import NamedTuple

from schemas.messages import pack_answer, pack_answers, unpack_answers
from schemas.requests import InferResponse, Parameters
from schemas.tensors import Tensor
from schemas.wire import MalformedMessage

_ENTRY_BYTES = 256
_OUTPUT_BYTES = 192
"""What an entry, and an output of it, takes up beside names, parameters and content: measured, rounded up."""


class CachedOutput(NamedTuple):
    """An output, with its content."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


class CachedAnswer(NamedTuple):
    """The outputs and response parameters by which `version` of a model answered."""

    version: int
    outputs: tuple[CachedOutput, ...]
    parameters: Parameters | None

    @property
    def size_bytes(self) -> int:
        """About the memory that it takes up."""
        parameters = len(repr(self.parameters)) if self.parameters else 0
        outputs = sum(_OUTPUT_BYTES + len(o.name) + 8 * len(o.shape) + len(o.data) for o in self.outputs)
        return _ENTRY_BYTES + parameters + outputs

    def response(self, model: str, id: str) -> InferResponse:
        """The answer to another request of the same content; outputs are not copied."""
        outputs = [Tensor(o.name, o.datatype, o.shape, o.data) for o in self.outputs]
        parameters = None if self.parameters is None else dict(self.parameters)
        return InferResponse(model, str(self.version), id, outputs, parameters)

    def pack(self) -> bytes:
        """As it lies in a shared cache: an answers message of one answer."""
        outputs = (Tensor(o.name, o.datatype, o.shape, o.data) for o in self.outputs)
        return pack_answers(self.version, [pack_answer(0, outputs, self.parameters)])

    @classmethod
    def unpack(cls, data: bytes) -> CachedAnswer:
        """What was packed. Raises MalformedMessage."""
        version, answers = unpack_answers(data)
        if len(answers) != 1 or answers[0].outputs is None or answers[0].error is not None:
            raise MalformedMessage("not an answer that was cached")
        outputs = []
        for tensor in answers[0].outputs:
            if not isinstance(tensor.data, bytes):
                raise MalformedMessage("not an answer that was cached: its content lies elsewhere")
            outputs.append(CachedOutput(tensor.name, tensor.datatype, tuple(tensor.shape), tensor.data))
        return cls(version, tuple(outputs), answers[0].parameters)

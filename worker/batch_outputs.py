"""`BatchOutputs`: from the arrays that a model made of a batch to the result of each request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schemas.model_config import ModelConfig
from schemas.requests import InferRequest
from worker.backend import Result
from worker.batch_tensors import split_outputs
from worker.scattered_outputs import scattered_outputs
from worker.tensor_declarations import NamedDatatype


class BatchOutputs:
    """Those of one model. `names` are what it answers with, in order: the outputs, and the states that are none of them."""

    def __init__(
        self, config: ModelConfig, outputs: Sequence[NamedDatatype], states: Sequence[NamedDatatype] = ()
    ) -> None:
        self.names = list(dict.fromkeys([*outputs, *states]))
        self.has_states = bool(states)
        self._outputs = outputs
        self._states = states
        self._batching = config.max_batch_size > 0
        self._scattered = scattered_outputs(config)

    def results(self, requests: Sequence[InferRequest], arrays: Sequence[np.ndarray]) -> list[Result]:
        """One for each request, with views of its rows of `arrays`, which stand in the order of `names`.

        Raises WeirError for arrays that have not the batch's rows.
        """
        if not self._states:
            outputs = [(name, datatype, array) for (name, datatype), array in zip(self._outputs, arrays, strict=True)]
            return [Result(tensors) for tensors in split_outputs(requests, outputs, self._batching, self._scattered)]
        by_name = dict(zip(self.names, arrays, strict=True))
        outputs, states = (
            [(tensor.name, tensor.datatype, by_name[tensor]) for tensor in named]
            for named in (self._outputs, self._states)
        )
        return [
            Result(tensors, states=of_sequence)
            for tensors, of_sequence in zip(
                split_outputs(requests, outputs, self._batching, self._scattered),
                split_outputs(requests, states, self._batching, wanted_only=False),
                strict=True,
            )
        ]

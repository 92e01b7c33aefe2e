"""`ArrayInstance`: an instance of a model that is a function of numpy arrays, whatever backend runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from schemas.model_config import ModelConfig
from schemas.requests import InferRequest
from worker.backend import Execution, Result
from worker.batch_inputs import BatchInputs
from worker.batch_outputs import BatchOutputs
from worker.batch_tensors import BatchAssembler, ragged_inputs
from worker.tensor_declarations import NamedDatatype


class ArrayRunner(Protocol):
    """One instance of a model that runs on arrays of the host. All calls come from the thread of the instance."""

    def run(self, inputs: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        """The model's outputs, in the order of the names it was given at its making.

        Arrays of BYTES hold `bytes` as objects. Inputs are read-only, and valid until it returns. Raises WeirError.
        """

    def close(self) -> None:
        """Gives up what it holds."""


class ArrayInstance:
    """See the module, and `worker.backend.Instance`: batches are put together for `runner` and its outputs taken apart.

    `outputs` and then `states` are the names that the runner answers with.
    """

    def __init__(
        self,
        runner: ArrayRunner,
        config: ModelConfig,
        outputs: Sequence[NamedDatatype],
        states: Sequence[NamedDatatype] = (),
    ) -> None:
        self._runner = runner
        self._outputs = BatchOutputs(config, outputs, states)
        self._batching = config.max_batch_size > 0
        self._assembler = BatchAssembler(ragged_inputs(config))
        self._batch_inputs = BatchInputs(config) or None

    def execute(self, requests: Sequence[InferRequest], execution: Execution) -> list[Result]:
        """See `worker.backend.Instance`."""
        inputs = self._assembler.assemble(requests, self._batching, execution.reader)
        if self._batch_inputs is not None:
            inputs |= self._batch_inputs.of(requests)
        execution.input_ready()
        arrays = self._runner.run(inputs)
        execution.inferred()
        return self._outputs.results(requests, arrays)

    def close(self) -> None:
        """See `worker.backend.Instance`."""
        self._runner.close()

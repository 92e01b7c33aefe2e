"""The tensors that a model's file declares, and whether its configuration fits them; for backends, when they load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import internal, invalid
from weir.schemas.core.tensors import BY_CONFIG_NAME
from weir.worker.execution.batch_tensors import BatchInputs, NamedDatatype, ragged_inputs


class TensorDeclarations:
    """The tensors that a model's file declares: `inputs` as shapes (-1: variable), `outputs` as configuration datatypes."""

    def __init__(self, inputs: Mapping[str, Sequence[int]], outputs: Mapping[str, str]) -> None:
        self._inputs = inputs
        self._outputs = outputs

    def check_inputs(self, config: ModelConfig) -> None:
        """Raises WeirError for ragged inputs and batch inputs that the model does not accept."""
        for name in ragged_inputs(config):
            shape = list(self._inputs.get(name, [-1]))
            if shape != [-1]:
                raise invalid(
                    f"unable to load model '{config.name}', configuration expects model provides input with shape [-1]  "
                    f"for ragged input '{name}', model provides [{','.join(map(str, shape))}]"
                )
        for name in BatchInputs(config).names:
            if name not in self._inputs:
                raise invalid(f"unexpected inference input '{name}', allowed inputs are: {_listed(self._inputs)}")

    def outputs(self, config: ModelConfig) -> list[NamedDatatype]:
        """The configured outputs. Raises WeirError for one that the model does not have."""
        found: list[NamedDatatype] = []
        for output in config.output:
            if output.name not in self._outputs:
                raise invalid(
                    f"unexpected inference output '{output.name}', allowed outputs are: {_listed(self._outputs)}"
                )
            found.append(NamedDatatype(output.name, BY_CONFIG_NAME[self._outputs[output.name]].name))
        return found

    def states(self, config: ModelConfig) -> list[NamedDatatype]:
        """The outputs that are implicit states. Raises WeirError if the model lacks a control or state tensor."""
        batching = config.sequence_batching
        if batching is None:
            return []
        for control_input in batching.control_input:
            if control_input.name not in self._inputs:
                raise internal(
                    f"configuration specified sequence control '{control_input.name}', but model does not provide that "
                    "input"
                )
        found: list[NamedDatatype] = []
        for state in batching.state:
            if state.input_name not in self._inputs:
                raise invalid(
                    f"unexpected sequence state input '{state.input_name}', allowed inputs are: {_listed(self._inputs)}"
                )
            if state.output_name not in self._outputs:
                raise invalid(
                    f"unexpected sequence state output '{state.output_name}', allowed outputs are: "
                    f"{_listed(self._outputs)}"
                )
            if self._outputs[state.output_name] != state.data_type:
                raise invalid(
                    f"sequence state output '{state.output_name}' of model '{config.name}' is "
                    f"{self._outputs[state.output_name]}, but the configuration specifies {state.data_type}"
                )
            found.append(NamedDatatype(state.output_name, BY_CONFIG_NAME[state.data_type].name))
        return found


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names))

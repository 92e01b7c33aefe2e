"""`EnsemblePlan`: the steps of an ensemble, and which of them a request for some of its outputs needs.

Source: Triton's ensembles. A step runs when every tensor it takes has arrived; steps that contribute to none of the
requested outputs never run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from repository.dependencies import step_identity
from schemas.model_config import ModelConfig

_MAX_SELECTIONS = 64


class Step(NamedTuple):
    """One step: `inputs` and `outputs` are (tensor of the model, tensor of the ensemble); `version` is "" for the latest.

    `is_decoupled`: the model may answer any number of times.
    """

    number: int
    model: str
    version: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    is_decoupled: bool = False


class Selection(NamedTuple):
    """What a request for `outputs` runs: `steps` by index, and which of them take each tensor."""

    outputs: frozenset[str]
    steps: dict[int, Step]
    takers: dict[str, tuple[Step, ...]]


class EnsemblePlan:
    """The steps of `config`, an ensemble that was checked; `decoupled` names the models that are."""

    def __init__(self, config: ModelConfig, decoupled: Collection[str] = ()) -> None:
        scheduling = config.ensemble_scheduling
        rows = [] if scheduling is None else scheduling.step
        self.steps = tuple(
            Step(
                index,
                step_identity(row),
                "" if row.model_version < 0 else str(row.model_version),
                tuple(row.input_map.items()),
                tuple(row.output_map.items()),
                step_identity(row) in decoupled,
            )
            for index, row in enumerate(rows)
        )
        self.inputs = frozenset(tensor.name for tensor in config.input)
        self.outputs = tuple(tensor.name for tensor in config.output)
        self.is_decoupled = any(step.is_decoupled for step in self.steps)
        self._writers = {tensor: step for step in self.steps for _, tensor in step.outputs}
        self._selections: dict[frozenset[str], Selection] = {}

    def select(self, outputs: Iterable[str]) -> Selection:
        """What runs for these outputs, all of them for none; kept, as requests ask for the same ones again."""
        wanted = frozenset(outputs) or frozenset(self.outputs)
        known = self._selections.get(wanted)
        if known is None:
            if len(self._selections) >= _MAX_SELECTIONS:
                self._selections.clear()
            known = self._selections[wanted] = self._select(wanted)
        return known

    def _select(self, wanted: frozenset[str]) -> Selection:
        needed: dict[int, Step] = {}
        tensors = list(wanted)
        while tensors:
            step = self._writers.get(tensors.pop())
            if step is not None and step.number not in needed:
                needed[step.number] = step
                tensors += [tensor for _, tensor in step.inputs]
        taken = {tensor for step in needed.values() for _, tensor in step.inputs}
        # What nobody takes is not asked for.
        steps = {
            index: needed[index]._replace(
                outputs=tuple(row for row in needed[index].outputs if row[1] in taken or row[1] in wanted)
            )
            for index in sorted(needed)
        }
        takers = {
            tensor: tuple(step for step in steps.values() if any(row[1] == tensor for row in step.inputs))
            for tensor in taken
        }
        return Selection(wanted, steps, takers)

"""`RegionOutputs`: which parts of a batch's outputs the GPU copies directly to memory that clients share on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from weir.schemas.core.requests import InferRequest
from weir.worker.backend_api.interface import DeviceTensor, Result
from weir.worker.cuda.buffers import size_of
from weir.worker.devices.cuda_shared_memory import MappedRegion
from weir.worker.execution.batch_tensors import BatchOutputs, batch_sizes

Regions = Mapping[tuple[int, str], MappedRegion]
"""Regions that get outputs, by position of the request and name of the output."""


@dataclass(slots=True, eq=False)
class RegionOutputs:
    """Outputs that the GPU copies to clients' memory.

    `parts` are (offset, size, region) by position of the output. Outputs at the positions in `only` are wanted nowhere
    else. `delivered` are (position of the request, name of the output, region).
    """

    parts: dict[int, list[tuple[int, int, MappedRegion]]] = field(default_factory=dict)
    only: list[int] = field(default_factory=list)
    delivered: list[tuple[int, str, MappedRegion]] = field(default_factory=list)

    def mark(self, results: Sequence[Result]) -> None:
        """Replaces the content of the outputs that are in their regions already by these regions."""
        for position, name, region in self.delivered:
            for tensor in results[position].outputs:
                if tensor.name == name:
                    tensor.data = region  # type: ignore[assignment]  # stands for content that is there already


def region_outputs(
    requests: Sequence[InferRequest],
    regions: Regions,
    names: BatchOutputs,
    outputs: Sequence[DeviceTensor | np.ndarray],
    batching: bool,
) -> RegionOutputs:
    """The parts of `outputs`, which are in the order of `names`, that go to `regions`.

    A request of which one output does not fit into its region gets none of them there: its results go to the host, where
    the request fails. Outputs on the host, or without a row for each row of the batch, go that way as well.
    """
    found = RegionOutputs()
    if not regions or names.has_states:
        return found
    sizes = batch_sizes(requests, batching)
    row_bytes: dict[int, int] = {}
    for position, ((name, _), output) in enumerate(zip(names.names, outputs, strict=True)):
        rows = output.shape[0] if batching and output.shape else 1
        if isinstance(output, DeviceTensor) and names.has_rows(name) and rows == sum(sizes) and rows:
            row_bytes[position] = size_of(output.datatype, output.shape) // rows
    failing = {
        at
        for position, size in row_bytes.items()
        for at, rows in enumerate(sizes)
        if (region := regions.get((at, names.names[position].name))) is not None and rows * size > region.size
    }
    for position, size in row_bytes.items():
        name, start, is_wanted_on_host = names.names[position].name, 0, False
        for at, (request, rows) in enumerate(zip(requests, sizes, strict=True)):
            part_bytes, region = rows * size, regions.get((at, name))
            if region is not None and at not in failing and part_bytes:
                found.parts.setdefault(position, []).append((start, part_bytes, region))
                found.delivered.append((at, name, region))
            elif not request.outputs or any(asked.name == name for asked in request.outputs):
                is_wanted_on_host = True
            start += part_bytes
        if not is_wanted_on_host:
            found.only.append(position)
    return found

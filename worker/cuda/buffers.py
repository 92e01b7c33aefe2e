"""`BatchBuffers`: the memory and the events of one batch, for its copies to a GPU and back, and its run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from weir.schemas.core.tensors import DATATYPES, element_count
from weir.worker.backend_api.interface import DeviceTensor
from weir.worker.cuda.pinned import HostBuffer, allocation_size
from weir.worker.cuda.stream import CudaEvent, CudaStream, DeviceBuffer, InstanceStreams
from weir.worker.devices.cuda_shared_memory import MappedRegion
from weir.worker.execution.batch_tensors import InputPieces

_NONE: Mapping[int, Sequence[tuple[int, int, MappedRegion]]] = {}

_ALIGNMENT = 256
"""The alignment of tensors in a buffer, as of CUDA's allocations."""


class BatchBuffers:
    """One of the two sets of an instance. Its buffers grow with the batches and are reused.

    A set is free when the results of its last batch were awaited, so nothing has to wait here. Inputs or outputs that are
    not pinned use ordinary memory. Events mark when the inputs were copied, when the run of the model started and ended,
    and when the outputs were on the host; a thread that waits for one `spins` or sleeps.
    """

    def __init__(self, streams: InstanceStreams, pins_inputs: bool, pins_outputs: bool, spins: bool) -> None:
        self._streams = streams
        self._pins_inputs = pins_inputs
        self._pins_outputs = pins_outputs
        self._host_in: HostBuffer | None = None
        self._host_out: HostBuffer | None = None
        self._device_in: DeviceBuffer | None = None
        self.inputs_copied = CudaEvent(spins)
        self.run_started = CudaEvent(spins)
        self.run_ended = CudaEvent(spins)
        self.outputs_copied = CudaEvent(spins)

    def copy_in(
        self, pieces: Sequence[InputPieces], targets: Mapping[str, DeviceTensor] | None = None
    ) -> dict[str, DeviceTensor]:
        """Joins inputs and enqueues their copies to the device, to `targets` or to memory of this set.

        Work that is enqueued on the instance's stream afterwards can use them.
        """
        streams = self._streams
        offsets, size = layout([piece.size_bytes for piece in pieces])
        host = self._host_in
        if host is None or host.size_bytes < size:
            host = self._host_in = HostBuffer(size, self._pins_inputs)
        device = self._device_in
        if targets is None and (device is None or device.size_bytes < size):
            # Memory that is allocated on the stream of the copies is valid for the copies after it.
            self._device_in = None
            device = self._device_in = streams.copy_in.allocate(allocation_size(size))
        tensors: dict[str, DeviceTensor] = {}
        for piece, offset in zip(pieces, offsets, strict=True):
            if targets is not None:
                tensor = targets[piece.name]
            else:
                assert device is not None  # noqa: S101 - allocated above
                tensor = DeviceTensor(piece.datatype, piece.shape, device.pointer + offset, device)
            tensors[piece.name] = tensor
            if piece.size_bytes:
                piece.write_into(host.array[offset:])
                if piece.in_regions:
                    self._copy_contents(piece, tensor.pointer, host.pointer + offset)
                else:
                    streams.copy_in.copy_in(tensor.pointer, host.pointer + offset, piece.size_bytes)
        streams.copy_in.record(self.inputs_copied)
        streams.compute.wait(self.inputs_copied)
        streams.compute.record(self.run_started)
        return tensors

    def _copy_contents(self, piece: InputPieces, to: int, host: int) -> None:
        """Enqueues copies of the contents of an input one by one: regions within the GPU, others from the host."""
        start = 0
        for content in piece.contents:
            if isinstance(content, MappedRegion):
                self._streams.copy_in.copy_within(to + start, content.pointer, len(content))
            elif len(content):
                self._streams.copy_in.copy_in(to + start, host + start, len(content))
            start += len(content)

    def copy_out(
        self,
        outputs: Sequence[DeviceTensor | np.ndarray],
        to_regions: Mapping[int, Sequence[tuple[int, int, MappedRegion]]] = _NONE,
        only_in_regions: Collection[int] = (),
    ) -> list[np.ndarray]:
        """Enqueues copies of outputs to the host, after the work on the instance's stream; returns the target arrays.

        Outputs that are arrays already are returned unchanged. `to_regions` has, by position of an output, (offset, size,
        region) of the parts that are copied to regions on this GPU. Outputs at the positions in `only_in_regions` are not
        copied to the host, and their arrays have no valid content.
        """
        compute, stream = self._streams.compute, self._streams.copy_out
        compute.record(self.run_ended)
        if stream is not compute:
            stream.wait(self.run_ended)
        sizes = [0 if isinstance(output, np.ndarray) else size_of(output.datatype, output.shape) for output in outputs]
        offsets, size = layout(sizes)
        host = self._host_out
        if size and (host is None or host.size_bytes < size):
            host = self._host_out = HostBuffer(size, self._pins_outputs)
        arrays: list[np.ndarray] = []
        for position, (output, offset, size) in enumerate(zip(outputs, offsets, sizes, strict=True)):
            if isinstance(output, np.ndarray):
                arrays.append(output)
                continue
            numpy_type = DATATYPES[output.datatype].numpy
            if not size:
                arrays.append(np.empty(output.shape, numpy_type))
                continue
            assert host is not None  # noqa: S101 - allocated above, because the size is not 0
            for start, part_size, region in to_regions.get(position, ()):
                stream.copy_within(region.pointer, output.pointer + start, part_size)
            if position not in only_in_regions:
                stream.copy_out(host.pointer + offset, output.pointer, size)
            arrays.append(host.array[offset : offset + size].view(numpy_type).reshape(output.shape))
        stream.record(self.outputs_copied)
        return arrays


def allocate_tensors(
    stream: CudaStream, tensors: Sequence[tuple[str, str, tuple[int, ...]]]
) -> dict[str, DeviceTensor]:
    """Allocates device memory on the stream for tensors of these (name, datatype, shape)."""
    offsets, size = layout([size_of(datatype, shape) for _, datatype, shape in tensors])
    memory = stream.allocate(size)
    return {
        name: DeviceTensor(datatype, shape, memory.pointer + offset, memory)
        for (name, datatype, shape), offset in zip(tensors, offsets, strict=True)
    }


def size_of(datatype: str, shape: Sequence[int]) -> int:
    """The size of a tensor in bytes."""
    return element_count(shape) * DATATYPES[datatype].size_bytes


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Aligned offsets for contents of these sizes, and the total size."""
    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, end

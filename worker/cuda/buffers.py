"""`BatchBuffers`: the memory and the events that one batch needs on its way to a GPU, through it and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from schemas.datatypes import DATATYPES
from schemas.tensors import element_count
from worker.batch_tensors import InputPieces
from worker.cuda.pinned import HostBuffer, roomy
from worker.cuda.stream import CudaEvent, CudaStream, DeviceBuffer, InstanceStreams
from worker.device_runner import DeviceTensor

_ALIGNMENT = 256
"""Of tensors in a buffer, as of CUDA's own allocations."""


class BatchBuffers:
    """See the module: one of the two sets of an instance. All of it grows with the batches, and stays.

    A batch takes a set once the results of the one before in it have been waited for, so nothing in it is waited for here.
    Where inputs or outputs are not to be pinned, they go through ordinary memory. Events tell when the inputs were there,
    when the run of the model began and ended, and when the outputs were on the host; waiting for one `spins`, or sleeps.
    """

    def __init__(self, streams: InstanceStreams, pins_inputs: bool, pins_outputs: bool, spins: bool) -> None:
        self._streams = streams
        self._pins_inputs = pins_inputs
        self._pins_outputs = pins_outputs
        self._host_in: HostBuffer | None = None
        self._host_out: HostBuffer | None = None
        self._device_in: DeviceBuffer | None = None
        self.inputs_copied = CudaEvent(spins)
        self.run_begun = CudaEvent(spins)
        self.run_ended = CudaEvent(spins)
        self.outputs_copied = CudaEvent(spins)

    def copy_in(
        self, pieces: Sequence[InputPieces], places: Mapping[str, DeviceTensor] | None = None
    ) -> dict[str, DeviceTensor]:
        """Puts inputs together and has them copied to the device, to `places` or to memory of this set.

        What is then done on the instance's stream finds them there.
        """
        streams = self._streams
        offsets, size = laid_out([piece.size_bytes for piece in pieces])
        host = self._host_in
        if host is None or host.size_bytes < size:
            host = self._host_in = HostBuffer(size, self._pins_inputs)
        device = self._device_in
        if places is None and (device is None or device.size_bytes < size):
            # What is allocated on the stream of the copies is there for what follows on it.
            self._device_in = None
            device = self._device_in = streams.copy_in.allocate(roomy(size))
        tensors: dict[str, DeviceTensor] = {}
        for piece, offset in zip(pieces, offsets, strict=True):
            if places is not None:
                tensor = places[piece.name]
            else:
                assert device is not None  # noqa: S101 - made above
                tensor = DeviceTensor(piece.datatype, piece.shape, device.pointer + offset, device)
            tensors[piece.name] = tensor
            if piece.size_bytes:
                piece.write_into(host.array[offset:])
                streams.copy_in.copy_in(tensor.pointer, host.pointer + offset, piece.size_bytes)
        streams.copy_in.record(self.inputs_copied)
        streams.compute.wait(self.inputs_copied)
        streams.compute.record(self.run_begun)
        return tensors

    def copy_out(self, outputs: Sequence[DeviceTensor | np.ndarray]) -> list[np.ndarray]:
        """Has outputs copied from the device, after what the instance's stream has been told; returns where they will be.

        Arrays among them are returned as they are.
        """
        compute, stream = self._streams.compute, self._streams.copy_out
        compute.record(self.run_ended)
        if stream is not compute:
            stream.wait(self.run_ended)
        sizes = [0 if isinstance(output, np.ndarray) else size_of(output.datatype, output.shape) for output in outputs]
        offsets, size = laid_out(sizes)
        host = self._host_out
        if size and (host is None or host.size_bytes < size):
            host = self._host_out = HostBuffer(size, self._pins_outputs)
        arrays: list[np.ndarray] = []
        for output, offset, size in zip(outputs, offsets, sizes, strict=True):
            if isinstance(output, np.ndarray):
                arrays.append(output)
                continue
            numpy_type = DATATYPES[output.datatype].numpy
            if not size:
                arrays.append(np.empty(output.shape, numpy_type))
                continue
            assert host is not None  # noqa: S101 - made above, as there is something to hold
            stream.copy_out(host.pointer + offset, output.pointer, size)
            arrays.append(host.array[offset : offset + size].view(numpy_type).reshape(output.shape))
        stream.record(self.outputs_copied)
        return arrays


def device_places(stream: CudaStream, tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> dict[str, DeviceTensor]:
    """Device memory of its own for tensors of these (name, datatype, shape), allocated on the stream."""
    offsets, size = laid_out([size_of(datatype, shape) for _, datatype, shape in tensors])
    memory = stream.allocate(size)
    return {
        name: DeviceTensor(datatype, shape, memory.pointer + offset, memory)
        for (name, datatype, shape), offset in zip(tensors, offsets, strict=True)
    }


def size_of(datatype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor."""
    return element_count(shape) * DATATYPES[datatype].size_bytes


def laid_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each of so many bytes begins, one behind the other and aligned, and how many there are in all."""
    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, end

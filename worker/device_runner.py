"""What a backend does on a GPU: runs a model on tensors in device memory, on the stream of its instance.

Copies to and from the device, the order of streams and the accounting of memory are the same for all backends, and none
of their business (`worker.cuda`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np


class DeviceTensor(NamedTuple):
    """A tensor in the memory of one GPU: contiguous, `pointer` is the address of its first byte.

    `datatype` is Triton's (`schemas.datatypes`). `owner` keeps the memory; it stays as it is for as long as that lives.
    """

    datatype: str
    shape: tuple[int, ...]
    pointer: int
    owner: object = None


class InstanceStream(Protocol):
    """The CUDA stream of one instance."""

    device_id: int
    """Ordinal of the GPU."""

    handle: int
    """The `cudaStream_t` as an integer, never 0; for every library that takes one."""

    def allocate(self, size_bytes: int) -> DeviceMemory:
        """Device memory, for what is done on this stream from now on. Raises WeirError (UNAVAILABLE) for none left."""


class DeviceMemory(Protocol):
    """Memory of a GPU: given up when nothing refers to it any more, after what its stream has been told to do."""

    pointer: int
    size_bytes: int


class DeviceRunner(Protocol):
    """One instance of a model on a GPU. All calls come from the thread of the instance.

    `host_inputs` are the inputs that it wants as arrays on the host: strings, and what says shapes. `can_capture` says
    that `enqueue` may be recorded as a CUDA graph: for inputs of the same shapes at the same places it tells the stream
    the same, waits for nothing, and has its outputs in memory of `InstanceStream.allocate` or of its own.
    """

    host_inputs: Collection[str]
    can_capture: bool

    def enqueue(self, inputs: Mapping[str, DeviceTensor | np.ndarray]) -> Sequence[DeviceTensor | np.ndarray]:
        """Has the model run, on the instance's stream, and returns its outputs, in the order of the names it was given.

        Returns as soon as the stream has been told to do it, where the library can: an output in device memory has its
        content once the stream has come that far. Inputs stay valid until then. Raises WeirError.
        """

    def close(self) -> None:
        """Gives up what it holds."""

"""The part of `cuda.bindings.driver` that Weir uses; `tests/support/fakes/README.md` describes the model."""

from __future__ import annotations

from . import runtime
from ._device import cudaError_t


class cuuint64_t(int):
    """A number of 64 bits."""


def cuMemGetAddressRange(pointer: int) -> tuple[cudaError_t, int, int]:
    """The first address and the size of the allocation around `pointer`."""
    for base, block in runtime.DEVICE.memory.items():
        if base <= pointer < base + len(block.content):
            return cudaError_t.cudaSuccess, base, len(block.content)
    return cudaError_t.cudaErrorInvalidValue, 0, 0

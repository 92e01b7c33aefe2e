"""The part of `cuda.bindings.utils` that Weir uses."""

from __future__ import annotations

from ._device import Handle


def get_cuda_native_handle(obj: object) -> int:
    """The number of a handle. Raises TypeError for what is none, as a plain number."""
    if not isinstance(obj, Handle):
        raise TypeError(f"Unknown type: {type(obj)}")
    return obj + 0

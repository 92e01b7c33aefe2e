"""`PreferredMemory` of `triton_python_backend_utils`: where a model would like the responses of others to lie."""

from __future__ import annotations

TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2


class PreferredMemory:
    """A kind of memory and the id of its device: a wish, and responses lie in host memory so far."""

    __slots__ = ("_device_id", "_kind")

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        kinds = (TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_GPU)
        if preferred_memory_type not in kinds or not isinstance(preferred_device_id, int):
            raise TypeError(
                "__init__(): incompatible constructor arguments. The following argument types are supported:\n"
                "    1. PreferredMemory(preferred_memory_type: MemoryType, preferred_device_id: int = 0)"
            )
        self._kind = preferred_memory_type
        self._device_id = preferred_device_id

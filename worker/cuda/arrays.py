"""`DeviceArray`: device memory as other libraries read it, and their arrays as tensors of Weir's.

Libraries read it without a copy: CuPy by `cupy.asarray(array)`, torch by `torch.as_tensor(array, device="cuda")`, JAX and
every other library of the array API standard by `from_dlpack(array)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from weir.schemas.core.errors import invalid
from weir.schemas.core.tensors import DATATYPES, name_of_numpy
from weir.worker.backend_api.interface import DeviceTensor
from weir.worker.cuda import dlpack
from weir.worker.cuda.runtime import check_cuda, cuda_runtime
from weir.worker.cuda.stream import CudaEvent, CudaStream

_PRODUCER_ORDERS = -1
"""As a consumer's stream: it orders the work by itself."""


class DeviceArray:
    """A contiguous array in the memory of a GPU: `shape`, `datatype` (Triton's) and `pointer`.

    Its content is ready for work on the instance's stream. A library that names another stream as it takes the array
    (`__dlpack__(stream=...)`) has that stream wait for it.
    """

    def __init__(self, tensor: DeviceTensor, stream: CudaStream) -> None:
        self.shape = tuple(tensor.shape)
        self.datatype = tensor.datatype
        self.pointer = tensor.pointer
        self._tensor = tensor
        self._stream = stream

    @property
    def tensor(self) -> DeviceTensor:
        """The memory, as Weir passes it on."""
        return self._tensor

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of NumPy's; BF16 is uint16."""
        return np.dtype(DATATYPES[self.datatype].numpy)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": dlpack.typestr_of(self.datatype),
            "data": (self.pointer, False),
            # Without a stream: work on the memory is ordered by using the instance's stream.
            "version": 3,
            "stream": None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self._stream.device_id

    def __dlpack__(self, *, stream: int | None = None, **_options: object) -> object:
        """A capsule. `stream` is the consumer's: 1 and None are CUDA's default stream, -1 needs no order."""
        if stream != _PRODUCER_ORDERS and stream != self._stream.handle:
            _order(self._stream, self._stream.handle, 1 if stream is None else stream)
        return dlpack.capsule_of(self._tensor, *self.__dlpack_device__())

    def __repr__(self) -> str:
        return f"DeviceArray({self.datatype}, {list(self.shape)}, GPU {self._stream.device_id})"


def output_tensor(name: str, value: Any, datatype: str, stream: CudaStream) -> DeviceTensor | np.ndarray:
    """An output that a backend returned: an array in device memory of any library, or an array on the host.

    Work on `stream` from now on sees its content, on whatever stream its library has written it. Raises WeirError for
    another datatype than the configured one, another GPU, or an array that is not contiguous.
    """
    if isinstance(value, np.ndarray):
        found = name_of_numpy(value.dtype) or str(value.dtype)
        if value.dtype != DATATYPES[datatype].numpy and not (datatype == "BYTES" and value.dtype.kind == "S"):
            raise invalid(f"output '{name}' is of type {found}, but the configuration specifies {datatype}")
        return value
    if isinstance(value, DeviceArray):
        tensor, number = value.tensor, stream.device_id
    elif hasattr(value, "__dlpack__"):
        tensor, number = _from_dlpack(name, value, stream)
    elif hasattr(value, "__cuda_array_interface__"):
        tensor, number = _from_interface(name, value.__cuda_array_interface__, value, stream), stream.device_id
    else:
        raise invalid(
            f"output '{name}' must be an array of NumPy, or one with __dlpack__ or __cuda_array_interface__, found type "
            f"'{type(value).__name__}'"
        )
    if number != stream.device_id:
        raise invalid(f"output '{name}' is on GPU {number}, but its instance on GPU {stream.device_id}")
    if tensor.datatype != datatype and not (datatype == "BF16" and tensor.datatype == "UINT16"):
        raise invalid(f"output '{name}' is of type {tensor.datatype}, but the configuration specifies {datatype}")
    return tensor._replace(datatype=datatype)


def _from_dlpack(name: str, value: Any, stream: CudaStream) -> tuple[DeviceTensor, int]:
    kind, _ = value.__dlpack_device__()
    if kind not in (dlpack.CUDA, dlpack.CUDA_MANAGED):
        raise invalid(f"output '{name}' is not on a GPU: return an array of NumPy, or of the instance's GPU")
    tensor, _, number = dlpack.tensor_of(value.__dlpack__(stream=stream.handle))
    return tensor, number


def _from_interface(name: str, interface: dict[str, Any], owner: object, stream: CudaStream) -> DeviceTensor:
    dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    datatype = name_of_numpy(dtype)
    if datatype is None:
        raise invalid(f"output '{name}' is of type {dtype}, which no datatype of Triton's is")
    strides: Sequence[int] | None = interface.get("strides")
    if strides is not None and 0 not in shape:
        dlpack.check_contiguous(shape, tuple(stride // dtype.itemsize for stride in strides))
    written_on = interface.get("stream")
    if written_on is not None and written_on != stream.handle:
        _order(stream, written_on, stream.handle)
    return DeviceTensor(datatype, shape, int(interface["data"][0]), owner)


def _order(stream: CudaStream, first: int, then: int) -> None:
    """Lets stream `then` wait for what stream `first` has now; `stream` is that of the instance."""
    runtime, event = cuda_runtime(), CudaEvent()
    check_cuda(runtime.cudaEventRecord(event.handle, first), "ordering streams of two libraries")
    check_cuda(runtime.cudaStreamWaitEvent(then, event.handle, 0), "ordering streams of two libraries")

"""The CUDA runtime: imported when it is first needed, with its error codes turned into exceptions."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from weir.schemas.core.errors import WeirError, internal, unavailable
from weir.worker.backend_api.interface import DeviceLost

STICKY = {
    "cudaErrorDevicesUnavailable": 46,
    "cudaErrorECCUncorrectable": 214,
    "cudaErrorNvlinkUncorrectable": 220,
    "cudaErrorContained": 226,
    "cudaErrorIllegalAddress": 700,
    "cudaErrorLaunchTimeout": 702,
    "cudaErrorContextIsDestroyed": 709,
    "cudaErrorAssert": 710,
    "cudaErrorHardwareStackError": 714,
    "cudaErrorIllegalInstruction": 715,
    "cudaErrorMisalignedAddress": 716,
    "cudaErrorInvalidAddressSpace": 717,
    "cudaErrorInvalidPc": 718,
    "cudaErrorLaunchFailure": 719,
    "cudaErrorTensorMemoryLeak": 721,
    "cudaErrorMpsClientTerminated": 810,
    "cudaErrorExternalDevice": 911,
    "cudaErrorUnknown": 999,
}
"""Errors after which CUDA can't be used in this process any more, with their numbers.

These are the errors for which CUDA's documentation requires that the process is terminated and relaunched, the
uncorrectable errors of memory and links, a device that is gone or that another process keeps to itself
(`DevicesUnavailable`), and what a driver reports whose state is lost (`Unknown`).
"""


def cuda_runtime() -> Any:
    """The module `cuda.bindings.runtime`. Raises WeirError (UNAVAILABLE) if it can't be imported."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise unavailable(f"the cuda-bindings package can't be used: {error}: install weir-serve[cuda]") from error
    return runtime


def handle_of(created: Any) -> int:
    """The number of a handle, such as a `cudaStream_t`, for other libraries."""
    from cuda.bindings.utils import get_cuda_native_handle

    handle: int = get_cuda_native_handle(created)
    return handle


def check_cuda(outcome: tuple[Any, ...], doing: str) -> Any:
    """The result of a CUDA call without its status: a value, a tuple of values, or None.

    `doing` describes the call. Raises DeviceLost for a status in `STICKY`, WeirError (INTERNAL) for any other error.
    """
    status = outcome[0]
    if status:
        raise_cuda(status, doing)
    return outcome[1] if len(outcome) == 2 else outcome[1:] or None


def raise_cuda(status: Any, doing: str) -> None:
    """Raises the exception for an error status, as `check_cuda` does."""
    name = getattr(status, "name", str(status))
    if name in STICKY:
        raise DeviceLost(f"CUDA error {name} while {doing}: the GPU can't be used by this process any more")
    raise internal(f"CUDA error {name} while {doing}")


class _Selection(threading.local):
    """The GPU that this thread has selected by `select_gpu`, -1 for none."""

    gpu = -1


_selection = _Selection()


def current_gpu() -> int:
    """The GPU that this thread has selected; -1 for none."""
    return _selection.gpu


def select_gpu(device_id: int) -> None:
    """Makes a GPU the current one of this thread, for good: new streams, events and kernels are that GPU's.

    This creates the process's context on the GPU, which takes time and some hundred MB of its memory.
    """
    check_cuda(cuda_runtime().cudaSetDevice(device_id), f"selecting GPU {device_id}")
    _selection.gpu = device_id


def free_on(device_id: int, free: Callable[..., object], *arguments: object) -> None:
    """Calls what frees a resource of a GPU (-1: of the one that is current), in whichever thread drops it last.

    In a thread that has selected no GPU, CUDA would create a context on the first one. On a lost GPU nothing can be freed.
    """
    with contextlib.suppress(WeirError, DeviceLost):
        if device_id in (-1, _selection.gpu):
            free(*arguments)
        else:
            with selected_gpu(device_id):
                free(*arguments)


@contextlib.contextmanager
def selected_gpu(device_id: int) -> Iterator[None]:
    """Selects a GPU within the context, and then again the one that the thread had selected, if it had one.

    A thread without one keeps this GPU: selecting CUDA's default, GPU 0, would create a context on it.
    """
    before = _selection.gpu
    select_gpu(device_id)
    try:
        yield
    finally:
        if before not in (-1, device_id):
            select_gpu(before)

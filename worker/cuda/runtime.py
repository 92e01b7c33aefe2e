"""The CUDA runtime as this package calls it: loaded when it is first needed, its errors made ours."""

from __future__ import annotations

from typing import Any

from schemas.errors import internal, unavailable
from worker.backend import DeviceLost

STICKY = frozenset(
    {
        "cudaErrorECCUncorrectable",
        "cudaErrorNvlinkUncorrectable",
        "cudaErrorContained",
        "cudaErrorIllegalAddress",
        "cudaErrorLaunchTimeout",
        "cudaErrorContextIsDestroyed",
        "cudaErrorAssert",
        "cudaErrorHardwareStackError",
        "cudaErrorIllegalInstruction",
        "cudaErrorMisalignedAddress",
        "cudaErrorInvalidAddressSpace",
        "cudaErrorInvalidPc",
        "cudaErrorLaunchFailure",
        "cudaErrorTensorMemoryLeak",
        "cudaErrorMpsClientTerminated",
        "cudaErrorExternalDevice",
    }
)
"""Errors after which CUDA does nothing in this process any more.

Those of which CUDA's documentation says that the process must be terminated and relaunched, and the uncorrectable errors of
memory and links.
"""


def cuda_runtime() -> Any:
    """The module `cuda.bindings.runtime`. Raises WeirError (UNAVAILABLE) where it can't be used."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise unavailable(f"the cuda-bindings package can't be used: {error}: install weir-serve[cuda]") from error
    return runtime


def succeed(outcome: tuple[Any, ...], doing: str) -> Any:
    """What a call of CUDA returned besides its status: a value, several in a tuple, or None.

    `doing` says what it was for. Raises DeviceLost for an error that stays, WeirError (INTERNAL) for any other.
    """
    status = outcome[0]
    if status:
        refuse(status, doing)
    return outcome[1] if len(outcome) == 2 else outcome[1:] or None


def refuse(status: Any, doing: str) -> None:
    """Raises the error that `status` is, as `succeed` does."""
    name = getattr(status, "name", str(status))
    if name in STICKY:
        raise DeviceLost(f"CUDA error {name} while {doing}: the GPU can't be used by this process any more")
    raise internal(f"CUDA error {name} while {doing}")

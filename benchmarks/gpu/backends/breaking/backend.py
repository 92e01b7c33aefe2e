"""Doubles its input with torch. Where the file `break` lies in the model's folder, the next run removes it and breaks.

On a GPU a kernel writes outside of all memory, after which CUDA does nothing more in its process. On a CPU the process is
killed.
"""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from weir.backend import Device, InstanceBackend, ModelVersion

KERNEL = b"""
.version 6.3
.target sm_75
.address_size 64
.visible .entry breaks()
{
    .reg .b64 %address;
    .reg .b32 %value;
    mov.u64 %address, 16;
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}
\0"""
"""Writes to address 16, which no allocation has."""


def launch_breaking_kernel(stream: int) -> None:
    """Enqueues the kernel on a stream of the current GPU. Raises RuntimeError if CUDA rejects it."""
    from cuda.bindings import driver

    status, module = driver.cuModuleLoadData(KERNEL)
    if not int(status):
        status, kernel = driver.cuModuleGetFunction(module, b"breaks")
    if not int(status):
        (status,) = driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0)
    if int(status):
        raise RuntimeError(f"the kernel can't be launched: {status}")


class Backend(InstanceBackend):
    kinds = ("KIND_CPU", "KIND_GPU")
    requires = ("torch",)

    def setup(self, model: ModelVersion, device: Device) -> None:
        import torch

        self.torch, self.device = torch, device
        self.file = model.model_directory / "break"
        self.place = f"cuda:{device.id}" if device.is_gpu else "cpu"

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        torch = self.torch
        if not self.device.is_gpu:
            if self.breaks():
                os.kill(os.getpid(), signal.SIGKILL)
            return {"OUTPUT": (torch.from_numpy(inputs["INPUT"].copy()) * 2).numpy()}
        with torch.cuda.stream(torch.cuda.ExternalStream(self.device.stream, device=self.place)):
            given = torch.as_tensor(inputs["INPUT"], device=self.place)
            if self.breaks():
                launch_breaking_kernel(self.device.stream)
            return {"OUTPUT": given * 2}

    def breaks(self) -> bool:
        """Whether this run is to break: once for each file."""
        with suppress(FileNotFoundError):
            self.file.unlink()
            return True
        return False

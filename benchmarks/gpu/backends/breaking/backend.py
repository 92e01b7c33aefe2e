"""Doubles its input with torch. Where the file `break` lies in the model's folder, the next run removes it and breaks.

On a GPU a kernel reads outside of its tensor, after which CUDA does nothing more in the process. On a CPU the process ends.
"""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from weir.backend import Device, InstanceBackend, ModelVersion


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
                # Outside of the tensor's three numbers, and of every allocation.
                far = torch.full((1,), 1 << 40, device=self.place)
                torch.gather(torch.zeros(3, device=self.place), 0, far)
            return {"OUTPUT": given * 2}

    def breaks(self) -> bool:
        """Whether this run is to break: once for each file."""
        with suppress(FileNotFoundError):
            self.file.unlink()
            return True
        return False

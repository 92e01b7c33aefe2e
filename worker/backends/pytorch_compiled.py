"""Packages of AOTInductor (`.pt2`): native code, bound to the kind of device and the instructions it was compiled for.

It tells how many inputs and outputs it has, and no more. It holds the interpreter's lock while it runs on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schemas.errors import invalid
from worker.backends.pytorch_exported import argument_names
from worker.backends.pytorch_names import Argument, Signature


class CompiledProgram:
    """See the module and `worker.backends.pytorch_programs.Program`. `runners` calls can be under way at once."""

    def __init__(self, torch: Any, path: Path, device: str | None, runners: int) -> None:
        from torch._inductor.package import load_package

        place = torch.device(device or "cpu")
        metadata = torch._C._aoti.AOTIModelPackageLoader.load_metadata_from_package(str(path), "model")
        compiled_for = metadata.get("AOTI_DEVICE_KEY", "")
        if device is not None and compiled_for and compiled_for != place.type:
            raise invalid(f"the package was compiled for {compiled_for}, and can't run on {place.type}")
        index = place.index if place.index is not None else -1
        self._loader = load_package(str(path), num_runners=runners, device_index=index).loader
        self._tree = torch.utils._pytree
        in_spec, self._out_spec = map(self._tree.treespec_loads, self._loader.get_call_spec())
        names = argument_names(self._tree, in_spec)
        self.signature = Signature(tuple(Argument(name or f"INPUT__{place}") for place, name in enumerate(names)))
        # Whether it writes to its inputs isn't known.
        self.writes_inputs = True
        self.keeps_state = False

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """See `Program`."""
        return self._tree.tree_unflatten(self._loader.boxed_run(list(arguments)), self._out_spec)

    def refusal(self, error: Exception) -> str:
        """See `Program`: what the package says of its inputs."""
        text = str(error)
        return text.strip() if text.startswith(("input_handles[", "expected inputs vector size")) else ""

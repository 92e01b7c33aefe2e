"""Packages of AOTInductor (`.pt2`): native code, bound to the kind of device and the instructions it was compiled for.

It tells how many inputs and outputs it has, and no more. It holds the interpreter's lock while it runs on the CPU.

Packages look at their inputs only because they are told to (`pytorch_library`), and then refuse a batch of one row unless
they were compiled with `aot_inductor.check_lowerbound` off, though they can run it. Such a batch is run with its row
twice: rows of a batch have nothing to do with each other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schemas.errors import invalid
from worker.backends.pytorch_exported import argument_names
from worker.backends.pytorch_names import Argument, Signature

_REFUSES_ONE_ROW = re.compile(
    r"input_handles\[\d+\]: dim value is too small at 0, expected it to be >= 2, but got: 1\b"
)


class CompiledProgram:
    """See the module and `worker.backends.pytorch_programs.Program`.

    `runners` calls can be under way at once. `batches` says that the first dimension of all inputs is the batch.
    """

    def __init__(self, torch: Any, path: Path, device: str | None, runners: int, batches: bool) -> None:
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
        self._join = torch.cat
        self._batches = batches
        self._doubles = False
        # Whether it writes to its inputs isn't known.
        self.writes_inputs = True
        self.keeps_state = False

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """See `Program`."""
        return self._tree.tree_unflatten(self._run(arguments), self._out_spec)

    def _run(self, arguments: Sequence[Any]) -> list[Any]:
        is_single = self._batches and all(value.dim() and value.shape[0] == 1 for value in arguments)
        if is_single and self._doubles:
            return self._run_doubled(arguments)
        try:
            outputs: list[Any] = self._loader.boxed_run(list(arguments))
        except RuntimeError as error:
            if not is_single or not _REFUSES_ONE_ROW.match(str(error)):
                raise
            self._doubles = True
            return self._run_doubled(arguments)
        return outputs

    def _run_doubled(self, arguments: Sequence[Any]) -> list[Any]:
        outputs = self._loader.boxed_run([self._join((value, value)) for value in arguments])
        return [value[:1] if value.dim() and value.shape[0] == 2 else value for value in outputs]

    def refusal(self, error: Exception) -> str:
        """See `Program`: what the package says of its inputs."""
        text = str(error)
        return text.strip() if text.startswith(("input_handles[", "expected inputs vector size")) else ""

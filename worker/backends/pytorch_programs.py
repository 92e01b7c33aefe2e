"""`Program`: a PyTorch model as something to be called, whatever file it comes from. TorchScript, and classes.

Programs of `torch.export` are in `pytorch_exported`, packages of AOTInductor in `pytorch_compiled`.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from schemas.errors import invalid
from worker.backends.pytorch_formats import Artifact
from worker.backends.pytorch_names import STRINGS, Argument, Signature
from worker.backends.pytorch_options import TorchOptions

_NUMBERS = ("int", "float", "bool")

Dims = Sequence[int]


class NotGiven:
    """In the place of an argument for which nothing is given."""


class Program(Protocol):
    """A model that was opened on a device.

    `writes_inputs`: it might change what it is given in place. `keeps_state`: one call might leave something to the next
    one, so instances can't share it.
    """

    signature: Signature
    writes_inputs: bool
    keeps_state: bool

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """What the model returns for one value for each argument (NotGiven for none), whatever that is made of."""

    def refusal(self, error: Exception) -> str:
        """Why inputs are not what the model was made for, where that is the reason for `error`, else ""."""


class ScriptProgram:
    """A TorchScript module; see `Program`. `device` is torch's name of one, None where the model chooses itself."""

    def __init__(self, torch: Any, path: Path, device: str | None) -> None:
        self._module = torch.jit.load(str(path), map_location=device).eval()
        schema = self._module.forward.schema
        self._call = self._module.forward
        self.signature = _script_signature(schema.arguments[1:])
        nodes = list(_nodes(self._module.inlined_graph))
        writes = [node for node in nodes if "!" in node.schema()]
        calls = any(node.kind() in ("prim::CallMethod", "prim::CallFunction", "prim::fork") for node in nodes)
        self.writes_inputs = calls or bool(writes)
        # Only a frozen module is known to keep nothing: all it has are constants, and none of them is written to.
        self.keeps_state = (
            calls
            or any(node.kind() in ("prim::GetAttr", "prim::SetAttr") for node in nodes)
            or any(value.node().kind() == "prim::Constant" for node in writes for value in list(node.inputs())[:1])
        )

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """See `Program`."""
        if self.signature.collects:
            return self._call(arguments[0])
        if NotGiven not in arguments:
            return self._call(*arguments)
        given = zip(self.signature.arguments, arguments, strict=True)
        return self._call(**{argument.name: value for argument, value in given if value is not NotGiven})

    def refusal(self, error: Exception) -> str:
        """See `Program`: TorchScript takes what it can compute with."""
        return ""


class ModuleProgram:
    """An object of a class that is given as source, with its weights; see `Program`.

    Of several classes in the file it is the first by name that it defines itself, as Triton takes the first by name.
    """

    def __init__(self, torch: Any, artifact: Artifact, device: str | None, options: TorchOptions) -> None:
        module = _imported(artifact.path)
        classes: list[tuple[str, Any]] = sorted(
            (name, found)
            for name, found in inspect.getmembers(module, inspect.isclass)
            if issubclass(found, torch.nn.Module) and found.__module__ == module.__name__
        )
        if not classes:
            raise invalid(f"Cannot find a subclass of torch.nn.Module in '{artifact.path.name}'")
        self._module = classes[0][1]()
        if artifact.weights is not None:
            # Never more than weights: a file of them could otherwise run code.
            weights = torch.load(artifact.weights, map_location=device, weights_only=True)
            self._module.load_state_dict(weights)
        if device is not None:
            self._module.to(device)
        self._module.eval()
        parameters = inspect.signature(self._module.forward).parameters.values()
        self.signature = Signature(
            tuple(
                Argument(parameter.name, is_optional=parameter.default is not parameter.empty)
                for parameter in parameters
                if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.POSITIONAL_ONLY)
            )
        )
        self._call = self._module
        if options.compile_arguments is not None:
            self._call = torch.compile(self._module, **options.compile_arguments)
        self.writes_inputs = self.keeps_state = True

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """See `Program`."""
        given = zip(self.signature.arguments, arguments, strict=True)
        return self._call(**{argument.name: value for argument, value in given if value is not NotGiven})

    def refusal(self, error: Exception) -> str:
        """See `Program`: nothing is known of what it takes."""
        return ""


def _imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"weir_model_{path.parent.parent.name}", path)
    if spec is None or spec.loader is None:
        raise invalid(f"'{path.name}' can't be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _script_signature(arguments: Sequence[Any]) -> Signature:
    kinds = [argument.type.annotation_str for argument in arguments]
    if len(kinds) == 1 and kinds[0] == "Dict[str, Tensor]":
        return Signature(collects="dict")
    if len(kinds) == 1 and kinds[0] == "List[Tensor]":
        return Signature(collects="list")
    found: list[Argument] = []
    for argument, kind in zip(arguments, kinds, strict=True):
        if kind.startswith("Dict["):
            raise invalid(
                "Multiple inputs of kind DictType were detected. Only a single input of type Dict(str, Tensor) is "
                "supported."
            )
        if kind in ("Tensor", "Optional[Tensor]"):
            found.append(Argument(argument.name, is_optional=argument.has_default_value()))
        elif kind == "List[str]":
            found.append(Argument(argument.name, STRINGS, argument.has_default_value()))
        elif kind in _NUMBERS or argument.has_default_value():
            found.append(Argument(argument.name, kind, argument.has_default_value()))
        else:
            raise invalid(
                f"An input of type '{kind}' was detected in the model. Only a single input of type Dict(str, Tensor) or "
                "input(s) of type Tensor are supported."
            )
    return Signature(tuple(found))


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)

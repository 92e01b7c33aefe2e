"""PyTorch model files and the programs opened from them: what is called to run a model, whatever format it has.

The content of a file decides its format, because names alone don't: all kinds are zip archives. A `.pt2` may be a program
of `torch.export` or a package of AOTInductor. A `.pt` may be TorchScript, or weights alone, which need a `model.py` beside
them with the class that they belong to.
"""

from __future__ import annotations

import inspect
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from weir.repository.completion import DescribedTensor
from weir.schemas.core.errors import WeirError, invalid, unavailable
from weir.worker.backend_api.interface import ModelVersion
from weir.worker.backends.custom import import_file
from weir.worker.backends.pytorch.library import TorchOptions
from weir.worker.backends.pytorch.signature import STRINGS, Argument, Signature

_MODULE_FILE = "model.py"
_DEFAULT_FILES = ("model.pt", "model.pt2")


class Format(Enum):
    """The format of a model file."""

    TORCHSCRIPT = "TorchScript"
    EXPORTED = "torch.export"
    COMPILED = "AOTInductor"
    MODULE = "torch.nn.Module"
    """The source of a class, with a file of weights beside it."""


class Artifact(NamedTuple):
    """A model's file; `weights` is the file of weights for a class given as source, None where there is none."""

    format: Format
    path: Path
    weights: Path | None = None


def find_artifact(model: ModelVersion) -> Artifact:
    """The file of this version. Raises WeirError when there is none, or it can't be served.

    As in Triton this is `default_model_filename`, by default `model.pt` or else `model.pt2`, and `model.py` where `runtime`
    or `default_model_filename` names it. Weir also uses `model.py` where the file beside it contains only weights.
    """
    config = model.config
    name = config.default_model_filename
    if config.runtime == _MODULE_FILE or name.endswith(".py"):
        return _module_artifact(model, name if name.endswith(".py") else _MODULE_FILE)
    is_default = name in ("", *_DEFAULT_FILES)
    names = dict.fromkeys([name, *_DEFAULT_FILES] if is_default else [name])
    path = next((model.directory / name for name in names if name and (model.directory / name).is_file()), None)
    if path is None:
        if is_default and (model.directory / _MODULE_FILE).is_file():
            return _module_artifact(model, _MODULE_FILE)
        raise unavailable(f"unable to find '{name or _DEFAULT_FILES[0]}' in version {model.version} of '{model.name}'")
    found = format_of(path)
    if found is not None:
        return Artifact(found, path)
    if (model.directory / _MODULE_FILE).is_file():
        return _module_artifact(model, _MODULE_FILE)
    raise _unknown_format(model, path)


def format_of(path: Path) -> Format | None:
    """The format of a file, None for one that contains weights alone, or is not PyTorch's."""
    try:
        with zipfile.ZipFile(path) as archive:
            # All members lie in one folder, which has the name that the file was written under.
            members = {name.partition("/")[2] for name in archive.namelist()}
    except (zipfile.BadZipFile, OSError):
        return None
    if any(member.startswith("data/aotinductor/") for member in members):
        return Format.COMPILED
    if any(member.startswith("models/") and member.endswith(".json") for member in members):
        return Format.EXPORTED
    if any(member.startswith("code/") for member in members):
        return Format.TORCHSCRIPT
    return None


def _module_artifact(model: ModelVersion, name: str) -> Artifact:
    path = model.directory / name
    if not path.is_file():
        raise unavailable(f"unable to find '{name}' in version {model.version} of '{model.name}'")
    weights = path.with_suffix(".pt")
    return Artifact(Format.MODULE, path, weights if weights.is_file() else None)


def _unknown_format(model: ModelVersion, path: Path) -> WeirError:
    return invalid(
        f"failed to load model '{model.name}': '{path.name}' is neither TorchScript nor written by torch.export nor "
        "compiled by AOTInductor; weights alone (a state_dict) need a model.py beside them"
    )


_NUMBERS = ("int", "float", "bool")


class NotGiven:
    """Stands in place of an argument for which no value is given."""


class Program(Protocol):
    """A model that is opened on a device.

    `writes_inputs`: it may change its inputs in place. `keeps_state`: a call may depend on earlier ones, so that instances
    can't share it.
    """

    signature: Signature
    writes_inputs: bool
    keeps_state: bool

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """What the model returns for one value for each argument (NotGiven where there is none)."""

    def input_error(self, error: Exception) -> str:
        """What is wrong with the inputs, where that caused `error`; otherwise ""."""


class ScriptProgram:
    """A TorchScript module, as a `Program`. `device` is torch's name, None where the model places itself."""

    def __init__(self, torch: Any, path: Path, device: str | None) -> None:
        self._module = torch.jit.load(str(path), map_location=device).eval()
        schema = self._module.forward.schema
        self._call = self._module.forward
        self.signature = _script_signature(schema.arguments[1:])
        nodes = list(_nodes(self._module.inlined_graph))
        writes = [node for node in nodes if "!" in node.schema()]
        calls = any(node.kind() in ("prim::CallMethod", "prim::CallFunction", "prim::fork") for node in nodes)
        self.writes_inputs = calls or bool(writes)
        # Only a frozen module certainly keeps no state: it has nothing but constants, and writes to none of them.
        self.keeps_state = (
            calls
            or any(node.kind() in ("prim::GetAttr", "prim::SetAttr") for node in nodes)
            or any(value.node().kind() == "prim::Constant" for node in writes for value in list(node.inputs())[:1])
        )

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """Runs the model."""
        if self.signature.collects:
            return self._call(arguments[0])
        if NotGiven not in arguments:
            return self._call(*arguments)
        given = zip(self.signature.arguments, arguments, strict=True)
        return self._call(**{argument.name: value for argument, value in given if value is not NotGiven})

    def input_error(self, error: Exception) -> str:
        """Always "": TorchScript does not check its inputs."""
        return ""


class ModuleProgram:
    """An object of a class given as source, with its weights, as a `Program`.

    Of several classes that the file defines this is the first by name, as in Triton.
    """

    def __init__(self, torch: Any, artifact: Artifact, device: str | None, options: TorchOptions) -> None:
        module = import_file(artifact.path, f"model_{artifact.path.parent.parent.name}")
        classes: list[tuple[str, Any]] = sorted(
            (name, found)
            for name, found in inspect.getmembers(module, inspect.isclass)
            if issubclass(found, torch.nn.Module) and found.__module__ == module.__name__
        )
        if not classes:
            raise invalid(f"Cannot find a subclass of torch.nn.Module in '{artifact.path.name}'")
        self._module = classes[0][1]()
        if artifact.weights is not None:
            # Weights only, because any other content of the file could run code.
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
        """Runs the model."""
        given = zip(self.signature.arguments, arguments, strict=True)
        return self._call(**{argument.name: value for argument, value in given if value is not NotGiven})

    def input_error(self, error: Exception) -> str:
        """Always "": the valid inputs of a class are not known."""
        return ""


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


class BatchRange(NamedTuple):
    """The allowed sizes of the first dimension of the inputs; `most` is None for no limit."""

    least: int
    most: int | None


class ProgramTensor(NamedTuple):
    """An input or output: its name, torch's type, its shape, and the symbol of the first dimension if that is variable."""

    name: str
    dtype: Any
    dims: list[int]
    first_symbol: str


class ExportedProgram:
    """A program of `torch.export` (`.pt2`), as a `Program`. `inputs` and `outputs` are those that the file describes."""

    def __init__(self, torch: Any, path: Path, device: str | None) -> None:
        program = torch.export.load(str(path))
        if device is not None and device != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        self._module = program.module()
        self._tree = torch.utils._pytree
        self._in_spec = program.call_spec.in_spec
        signature = program.graph_signature
        values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        names = argument_names(self._tree, self._in_spec)
        self._fixed: dict[int, Any] = {}
        arguments: list[Argument] = []
        self.inputs: list[ProgramTensor] = []
        self.batch_range: BatchRange | None = None
        for spec in (row for row in signature.input_specs if row.kind.name == "USER_INPUT"):
            place = len(arguments)
            is_constant = type(spec.arg).__name__ == "ConstantArgument"
            name = names[place] or spec.arg.name
            if is_constant:
                self._fixed[place] = spec.arg.value
            elif type(spec.arg).__name__ != "TensorArgument":
                raise invalid(f"argument '{name}' of the model is not a tensor, so no input can be passed to it")
            else:
                value = values[spec.arg.name]
                self.inputs.append(_program_tensor(name, value))
                if self.batch_range is None:
                    self.batch_range = _batch_range(program, value)
            arguments.append(Argument(name, is_optional=is_constant))
        self.outputs: list[ProgramTensor] = []
        out_names = _output_names(self._tree, program.call_spec.out_spec)
        for name, spec in zip(
            out_names, (row for row in signature.output_specs if row.kind.name == "USER_OUTPUT"), strict=True
        ):
            value = values.get(getattr(spec.arg, "name", ""))
            if isinstance(value, torch.Tensor):
                self.outputs.append(_program_tensor(name, value))
        self.signature = Signature(tuple(arguments))
        written = _written(program.graph.nodes) | set(signature.user_inputs_to_mutate.values())
        self.writes_inputs = bool(written.intersection(map(str, signature.user_inputs)))
        self.keeps_state = bool(signature.buffers_to_mutate or written.difference(map(str, signature.user_inputs)))

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """Runs the model."""
        leaves = list(arguments)
        for place, value in self._fixed.items():
            leaves[place] = value
        positional, named = self._tree.tree_unflatten(leaves, self._in_spec)
        return self._module(*positional, **named)

    def input_error(self, error: Exception) -> str:
        """The failed guard of the exported program."""
        text = str(error)
        if isinstance(error, AssertionError) or text.startswith(("Tensor dtype mismatch", "Expected input at")):
            return text
        return ""


def argument_names(tree: Any, in_spec: Any) -> list[str]:
    """For each leaf of the program's arguments its keyword, or its key in a dictionary; "" where it has neither."""
    leaves, _ = tree.tree_flatten_with_path(tree.tree_unflatten(list(range(in_spec.num_leaves)), in_spec))
    return [_last_key(path) for path, _ in leaves]


def describe_tensors(rows: Sequence[ProgramTensor], names: Sequence[str], types: Any) -> list[DescribedTensor]:
    """The tensors `rows` under other names, without those of a type that Triton does not have."""
    return [
        DescribedTensor(name, types(dtype), dims, symbol)
        for name, (_, dtype, dims, symbol) in zip(names, rows, strict=True)
        if types(dtype) is not None
    ]


def _output_names(tree: Any, out_spec: Any) -> list[str]:
    leaves, _ = tree.tree_flatten_with_path(tree.tree_unflatten(list(range(out_spec.num_leaves)), out_spec))
    return [_last_key(path) or f"OUTPUT__{position}" for position, (path, _) in enumerate(leaves)]


def _last_key(path: Sequence[Any]) -> str:
    for entry in reversed(path):
        key = getattr(entry, "key", None) or getattr(entry, "name", None)
        if isinstance(key, str):
            return key
    return ""


def _written(nodes: Iterable[Any]) -> set[str]:
    """The names of the placeholders (inputs, buffers, parameters) that the program writes to."""
    return {name for node in nodes for name in _origins(_aliased(node, lambda argument: argument.is_write))}


def _origins(nodes: Sequence[Any]) -> Iterator[str]:
    waiting, seen = list(nodes), set(nodes)
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder":
            yield node.name
        found = [other for other in _aliased(node, lambda _: True) if other not in seen]
        seen.update(found)
        waiting += found


def _aliased(node: Any, matches: Callable[[Any], bool]) -> list[Any]:
    """The nodes whose memory this one shares, by the schema of its operation; all its inputs where it has none."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return list(node.all_input_nodes) if node.op == "call_function" and matches(_UNKNOWN_ALIAS) else []
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    found: list[Any] = []
    for argument in schema.arguments:
        if argument.alias_info is not None and matches(argument.alias_info) and argument.name in given:
            value = given[argument.name]
            found += [part for part in (value if isinstance(value, (list, tuple)) else [value]) if hasattr(part, "op")]
    return found


class _UnknownAlias(NamedTuple):
    is_write: bool = False


_UNKNOWN_ALIAS = _UnknownAlias()


def _program_tensor(name: str, value: Any) -> ProgramTensor:
    symbols = [str(dim) for dim in value.shape[:1] if not isinstance(dim, int)]
    dims = [dim if isinstance(dim, int) else -1 for dim in value.shape]
    return ProgramTensor(name, value.dtype, dims, symbols[0] if symbols else "")


def _batch_range(program: Any, value: Any) -> BatchRange | None:
    if not value.shape or isinstance(value.shape[0], int):
        return None
    bounds = program.range_constraints.get(value.shape[0].node.expr)
    if bounds is None:
        return None
    try:
        return BatchRange(int(bounds.lower), int(bounds.upper))
    except (TypeError, ValueError, OverflowError, AttributeError):  # an unlimited bound is a symbol that is no integer
        return BatchRange(int(bounds.lower), None)


_ONE_ROW_REJECTED = re.compile(
    r"input_handles\[\d+\]: dim value is too small at 0, expected it to be >= 2, but got: 1\b"
)


class CompiledProgram:
    """A package of AOTInductor (`.pt2`), as a `Program`: native code for one kind of device and its instructions.

    It describes how many inputs and outputs it has, and no more. It holds the interpreter's lock while it runs on the CPU.
    `runners` calls can run at the same time. `batches`: the first dimension of all inputs is the batch.

    Packages check their inputs only because `torch_library` makes them. They then reject a batch of one row, unless
    they were compiled without `aot_inductor.check_lowerbound`, although they can run it. Such a batch is run with its
    row twice, because rows of a batch are independent of each other.
    """

    def __init__(self, torch: Any, path: Path, device: str | None, runners: int, batches: bool) -> None:
        from torch._inductor.package import load_package

        place = torch.device(device or "cpu")
        metadata = torch._C._aoti.AOTIModelPackageLoader.load_metadata_from_package(str(path), "model")
        compiled_for = metadata.get("AOTI_DEVICE_KEY", "")
        if device is not None and compiled_for and compiled_for != place.type:
            raise invalid(f"the package was compiled for {compiled_for}, so it can't run on {place.type}")
        index = place.index if place.index is not None else -1
        self._loader = load_package(str(path), num_runners=runners, device_index=index).loader
        self._tree = torch.utils._pytree
        in_spec, self._out_spec = map(self._tree.treespec_loads, self._loader.get_call_spec())
        names = argument_names(self._tree, in_spec)
        self.signature = Signature(tuple(Argument(name or f"INPUT__{place}") for place, name in enumerate(names)))
        self._join = torch.cat
        self._batches = batches
        self._doubles_rows = False
        # It is unknown whether a package writes to its inputs.
        self.writes_inputs = True
        self.keeps_state = False

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """Runs the model."""
        return self._tree.tree_unflatten(self._run(arguments), self._out_spec)

    def _run(self, arguments: Sequence[Any]) -> list[Any]:
        is_single = self._batches and all(value.dim() and value.shape[0] == 1 for value in arguments)
        if is_single and self._doubles_rows:
            return self._run_doubled(arguments)
        try:
            outputs: list[Any] = self._loader.boxed_run(list(arguments))
        except RuntimeError as error:
            if not is_single or not _ONE_ROW_REJECTED.match(str(error)):
                raise
            self._doubles_rows = True
            return self._run_doubled(arguments)
        return outputs

    def _run_doubled(self, arguments: Sequence[Any]) -> list[Any]:
        outputs = self._loader.boxed_run([self._join((value, value)) for value in arguments])
        return [value[:1] if value.dim() and value.shape[0] == 2 else value for value in outputs]

    def input_error(self, error: Exception) -> str:
        """The failed check of the package."""
        text = str(error)
        return text.strip() if text.startswith(("input_handles[", "expected inputs vector size")) else ""

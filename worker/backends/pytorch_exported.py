"""Programs of `torch.export` (`.pt2`): they tell all of their inputs and outputs, and refuse what they don't take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from repository.completion import DescribedTensor
from schemas.errors import invalid
from worker.backends.pytorch_names import Argument, Signature


class BatchRange(NamedTuple):
    """What the first dimension of the inputs may be; `most` is None for no limit."""

    least: int
    most: int | None


class ExportedProgram:
    """See the module and `worker.backends.pytorch_programs.Program`. `inputs` and `outputs` are as in the file."""

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
        self.inputs: list[tuple[str, Any, list[int]]] = []
        self.batch_range: BatchRange | None = None
        for spec in (row for row in signature.input_specs if row.kind.name == "USER_INPUT"):
            place = len(arguments)
            is_constant = type(spec.arg).__name__ == "ConstantArgument"
            name = names[place] or spec.arg.name
            if is_constant:
                self._fixed[place] = spec.arg.value
            elif type(spec.arg).__name__ != "TensorArgument":
                raise invalid(f"argument '{name}' of the model is no tensor, and can't be given one")
            else:
                value = values[spec.arg.name]
                self.inputs.append((name, value.dtype, _dims(value)))
                if self.batch_range is None:
                    self.batch_range = _batch_range(program, value)
            arguments.append(Argument(name, is_optional=is_constant))
        self.outputs: list[tuple[str, Any, list[int]]] = []
        out_names = _output_names(self._tree, program.call_spec.out_spec)
        for name, spec in zip(
            out_names, (row for row in signature.output_specs if row.kind.name == "USER_OUTPUT"), strict=True
        ):
            value = values.get(getattr(spec.arg, "name", ""))
            if isinstance(value, torch.Tensor):
                self.outputs.append((name, value.dtype, _dims(value)))
        self.signature = Signature(tuple(arguments))
        written = _written(program.graph.nodes) | set(signature.user_inputs_to_mutate.values())
        self.writes_inputs = bool(written.intersection(map(str, signature.user_inputs)))
        self.keeps_state = bool(signature.buffers_to_mutate or written.difference(map(str, signature.user_inputs)))

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """See `Program`."""
        leaves = list(arguments)
        for place, value in self._fixed.items():
            leaves[place] = value
        positional, named = self._tree.tree_unflatten(leaves, self._in_spec)
        return self._module(*positional, **named)

    def refusal(self, error: Exception) -> str:
        """See `Program`: the guards of what the program was exported for."""
        text = str(error)
        if isinstance(error, AssertionError) or text.startswith(("Tensor dtype mismatch", "Expected input at")):
            return text
        return ""


def argument_names(tree: Any, in_spec: Any) -> list[str]:
    """For each leaf of what the program takes its keyword, or its key in a dictionary; "" where it has neither."""
    leaves, _ = tree.tree_flatten_with_path(tree.tree_unflatten(list(range(in_spec.num_leaves)), in_spec))
    return [_last_key(path) for path, _ in leaves]


def described(rows: Sequence[tuple[str, Any, list[int]]], names: Sequence[str], types: Any) -> list[DescribedTensor]:
    """The tensors `rows` under other names; those of a type that Triton doesn't have are left out."""
    return [
        DescribedTensor(name, types(dtype), dims)
        for name, (_, dtype, dims) in zip(names, rows, strict=True)
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
    """The names of what the program is given that it writes to; of what it makes itself that is nobody's business."""
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
    """The nodes whose memory this one has a hold of, as the schema of its operation says; all of them where it has none."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return list(node.all_input_nodes) if node.op == "call_function" and matches(_UNKNOWN) else []
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    found: list[Any] = []
    for argument in schema.arguments:
        if argument.alias_info is not None and matches(argument.alias_info) and argument.name in given:
            value = given[argument.name]
            found += [part for part in (value if isinstance(value, (list, tuple)) else [value]) if hasattr(part, "op")]
    return found


class _Unknown(NamedTuple):
    is_write: bool = False


_UNKNOWN = _Unknown()


def _dims(value: Any) -> list[int]:
    return [dim if isinstance(dim, int) else -1 for dim in value.shape]


def _batch_range(program: Any, value: Any) -> BatchRange | None:
    if not value.shape or isinstance(value.shape[0], int):
        return None
    bounds = program.range_constraints.get(value.shape[0].node.expr)
    if bounds is None:
        return None
    try:
        return BatchRange(int(bounds.lower), int(bounds.upper))
    except (TypeError, ValueError, OverflowError, AttributeError):  # no limit is a number of its own kind
        return BatchRange(int(bounds.lower), None)

"""Maps inputs of a configuration to arguments of a PyTorch model, and outputs to its results.

Source: Triton's PyTorch backend. Inputs are named as the arguments of `forward`, or `<name>__<index>`, or are taken in the
order of the configuration; outputs are `<name>__<index>` or in that order. In Weir outputs may also be named as the keys
of a dictionary, or the fields of a named tuple, that the model returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.errors import WeirError, invalid
from weir.worker.execution.batch_tensors import BatchInputs

TENSOR = "tensor"
STRINGS = "strings"


class Argument(NamedTuple):
    """One argument of `forward`: `kind` is TENSOR, STRINGS (a list of them) or the type of a number ("int").

    `is_optional`: it has a default value.
    """

    name: str
    kind: str = TENSOR
    is_optional: bool = False


class Signature(NamedTuple):
    """The arguments of `forward`. If it takes all inputs as one argument, `collects` is "dict" (by name) or "list"."""

    arguments: Sequence[Argument] = ()
    collects: str = ""


def input_places(config: ModelConfig, signature: Signature) -> dict[str, int]:
    """The position of each input among the arguments, including the inputs that the server creates.

    Raises WeirError if the names or the number of inputs don't fit.
    """
    declared = [tensor.name for tensor in config.input]
    names = list(dict.fromkeys([*declared, *_server_inputs(config)]))
    by_argument = {argument.name: position for position, argument in enumerate(signature.arguments)}
    if signature.collects == "dict":
        return {name: position for position, name in enumerate(names)}
    if all(name in by_argument for name in declared):
        places = {name: by_argument[name] if name in by_argument else _index(name) for name in names}
    elif all(_index(name) is not None for name in declared):
        places = {name: _index(name) for name in names}
    else:
        places = {name: position for position, name in enumerate(declared)}
        for name in names[len(declared) :]:
            own = by_argument.get(name, _index(name))
            places[name] = own if own is not None and own not in places.values() else len(places)
    return _checked_inputs(config, signature, places)


def _checked_inputs(config: ModelConfig, signature: Signature, places: Mapping[str, int | None]) -> dict[str, int]:
    found: dict[str, int] = {}
    taken: dict[int, str] = {}
    for name, place in places.items():
        if place is None:
            raise invalid(
                f"input '{name}' of model '{config.name}' is neither an argument of its forward "
                f"({_listed(signature)}) nor named <name>__<index>"
            )
        if place in taken:
            raise invalid(f"inputs '{taken[place]}' and '{name}' of model '{config.name}' are the same argument")
        taken[place], found[name] = name, place
    if signature.collects == "list":
        missing = any(place not in taken for place in range(len(found)))
    else:
        arguments = signature.arguments
        missing = any(not row.is_optional and place not in taken for place, row in enumerate(arguments))
        missing = missing or any(place >= len(arguments) for place in taken)
    if missing:
        provided = len(found) if signature.collects else len(signature.arguments)
        raise invalid(
            f"unable to load model '{config.name}', configuration expects {len(found)} inputs, model provides {provided}"
            + ("" if signature.collects else f" ({_listed(signature)})")
        )
    return found


def output_places(config: ModelConfig, names: Sequence[str]) -> dict[str, int]:
    """The position of each of these outputs, some of which may be states, among the model's results."""
    if all(_index(name) is not None for name in names):
        return {name: int(_index(name) or 0) for name in names}
    return {name: position for position, name in enumerate(names)}


def no_such_output(name: str, provided: int) -> WeirError:
    """The error for an output that the model does not return, in Triton's words."""
    return invalid(
        f"The output {name} in the model configuration refers to an output index which doesn't exist. This model has "
        f"{provided} outputs"
    )


def check_strings(config: ModelConfig) -> None:
    """Raises WeirError for strings with more than one dimension, including that of the batch."""
    for kind, tensors in (("input", config.input), ("output", config.output)):
        for tensor in tensors:
            dims = tensor.dims if tensor.reshape is None else tensor.reshape.shape
            if tensor.data_type == "TYPE_STRING" and len(dims) + (config.max_batch_size > 0) > 1:
                raise invalid(
                    f"Triton only supports 1 dimensional List of String as {kind} for '{tensor.name}' for model "
                    f"'{config.name}'"
                )


def _server_inputs(config: ModelConfig) -> list[str]:
    names = BatchInputs(config).names
    if config.sequence_batching is not None:
        names += [control.name for control in config.sequence_batching.control_input]
        names += [state.input_name for state in config.sequence_batching.state]
    return names


def _index(name: str) -> int | None:
    _, _, index = name.partition("__")
    return int(index) if index.isascii() and index.isdigit() else None


def _listed(signature: Signature) -> str:
    return ", ".join(argument.name for argument in signature.arguments)

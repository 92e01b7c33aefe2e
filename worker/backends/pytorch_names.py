"""Which argument of a PyTorch model an input is, and which of its results an output.

Source: Triton's PyTorch backend. Inputs are named as the arguments of `forward`, or `<name>__<index>`, or are taken in the
order of the configuration; outputs are `<name>__<index>` or in that order. Here outputs may also be named as the keys of
a dictionary or the fields of a named tuple that the model returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from schemas.errors import WeirError, invalid
from schemas.model_config import ModelConfig
from worker.batch_inputs import BatchInputs

TENSOR = "tensor"
STRINGS = "strings"


class Argument(NamedTuple):
    """One argument of `forward`: `kind` is TENSOR, STRINGS (a list of them) or what a number is ("int").

    `is_optional`: it has a default, so nothing need be given for it.
    """

    name: str
    kind: str = TENSOR
    is_optional: bool = False


class Signature(NamedTuple):
    """The arguments of `forward`; where it takes all inputs as one, `collects` is "dict" (by name) or "list"."""

    arguments: Sequence[Argument] = ()
    collects: str = ""


def input_places(config: ModelConfig, signature: Signature) -> dict[str, int]:
    """The position among the arguments of each input, those included that the server makes.

    Raises WeirError for names or numbers of them that don't fit.
    """
    declared = [tensor.name for tensor in config.input]
    names = list(dict.fromkeys([*declared, *_made_inputs(config)]))
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
    """The position among the model's results of each of these outputs, of which some may be states."""
    if all(_index(name) is not None for name in names):
        return {name: int(_index(name) or 0) for name in names}
    return {name: position for position, name in enumerate(names)}


def no_such_output(name: str, provided: int) -> WeirError:
    """The error for an output that is none of the model's results."""
    return invalid(
        f"The output {name} in the model configuration refers to an output index which doesn't exist. This model has "
        f"{provided} outputs"
    )


def check_strings(config: ModelConfig) -> None:
    """Raises WeirError for strings of more than one dimension, the batch's included."""
    for kind, tensors in (("input", config.input), ("output", config.output)):
        for tensor in tensors:
            dims = tensor.dims if tensor.reshape is None else tensor.reshape.shape
            if tensor.data_type == "TYPE_STRING" and len(dims) + (config.max_batch_size > 0) > 1:
                raise invalid(
                    f"Triton only supports 1 dimensional List of String as {kind} for '{tensor.name}' for model "
                    f"'{config.name}'"
                )


def _made_inputs(config: ModelConfig) -> list[str]:
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

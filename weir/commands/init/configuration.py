"""The configuration that `weir init` writes: how a model is batched, and the text of `config.pbtxt`. Pure."""

from __future__ import annotations

import textwrap
from typing import Any, NamedTuple

from weir.repository.completion import DefaultArtifact, DescribedModel, DescribedTensor
from weir.repository.config_text import config_to_text, parse_config
from weir.repository.loading import ConfigSource, resolve_config
from weir.repository.problems import ConfigProblem
from weir.schemas.config.model_config import DynamicBatching, ModelConfig, ModelInput, ModelOutput, Reshape

DEFAULT_LARGEST_BATCH = 8

_COLUMNS = 110


class Batching(NamedTuple):
    """The largest batch, 0 for none, and a sentence that explains the choice."""

    largest: int
    reason: str


def choose_batching(described: DescribedModel, wanted: int | None = None) -> Batching:
    """How a model of this description is batched. `wanted` is the largest batch that the user wants, None for the default.

    Raises ConfigProblem if the model can't be batched so.
    """
    fixed, obstacle = _fixed(described), _different_symbols(described)
    limit = described.largest_batch
    if wanted is not None and wanted > 0:
        if fixed:
            raise ConfigProblem("max_batch_size", f"the model can't be batched: {fixed}")
        if limit is not None and wanted > limit:
            raise ConfigProblem("max_batch_size", f"the model takes batches of at most {limit}, not {wanted}")
        return Batching(wanted, "Requests are joined to batches of at most this size along the first dimension.")
    if wanted == 0:
        return Batching(0, "Requests run one by one, as --max-batch-size=0 asks.")
    if fixed or obstacle:
        return Batching(0, f"Requests run one by one: {fixed or obstacle}.")
    if limit == 1:
        return Batching(1, "Requests run one by one: the model takes one row.")
    largest = min(DEFAULT_LARGEST_BATCH, limit or DEFAULT_LARGEST_BATCH)
    bound = (
        "The file sets this limit" if limit == largest else "Raise max_batch_size as far as memory and latency allow"
    )
    reason = f"The first dimension of every input and output is variable, so requests are joined to batches. {bound}."
    return Batching(largest, reason)


def _fixed(described: DescribedModel) -> str:
    """Why the first dimension can't be the batch; "" if it may be."""
    tensors = [*described.inputs, *described.outputs]
    if not described.inputs or not described.outputs:
        return "its inputs and outputs are not known"
    fixed = [tensor for tensor in tensors if not tensor.dims or tensor.dims[0] != -1]
    if fixed:
        shown = ", ".join(f"{tensor.name} {list(tensor.dims)}" for tensor in fixed[:3])
        return f"the first dimension is not variable in {shown}{', …' if len(fixed) > 3 else ''}"
    return ""


def _different_symbols(described: DescribedModel) -> str:
    """Why the first dimension is probably not the batch; "" if it probably is."""
    tensors = [*described.inputs, *described.outputs]
    symbols = {tensor.first_symbol: tensor.name for tensor in tensors if tensor.first_symbol}
    if len(symbols) > 1:
        shown = ", ".join(f"{symbol} of {name}" for symbol, name in symbols.items())
        return f"the first dimensions are not the same ({shown})"
    return ""


def make_config(name: str, artifact: DefaultArtifact, described: DescribedModel, batching: Batching) -> ModelConfig:
    """The configuration of a model with the inputs and outputs of `described`.

    Triton rejects scalars in the file of a model without batches, so these are left out, with all outputs if one is among
    them. The server adds them when it loads the model.
    """
    batches = batching.largest > 0
    inputs = [ModelInput(name=row.name, **_fields(row, batches)) for row in described.inputs if batches or row.dims]
    has_scalars = not batches and any(not row.dims for row in described.outputs)
    outputs = [ModelOutput(name=row.name, **_fields(row, batches)) for row in described.outputs]
    return ModelConfig(
        name=name,
        backend=artifact.backend,
        platform=artifact.platform if artifact.filename == "model.pt2" else "",
        max_batch_size=batching.largest,
        input=inputs,
        output=[] if has_scalars else outputs,
        dynamic_batching=DynamicBatching() if batching.largest > 1 else None,
    )


def _fields(row: DescribedTensor, batches: bool) -> dict[str, Any]:
    dims = list(row.dims[1:] if batches else row.dims)
    # `dims` can't be empty: a scalar is one element for clients, and reshaped for the model.
    return {"data_type": row.data_type, **({"dims": dims} if dims else {"dims": [1], "reshape": Reshape()})}


def config_text(config: ModelConfig, comment: str, batching: Batching | None) -> str:
    """The text of `config.pbtxt`, with a comment at its top, and the reason of `batching`, which may be left out."""
    head = config_to_text(ModelConfig(name=config.name, backend=config.backend, platform=config.platform))
    tensors = config_to_text(ModelConfig(input=config.input, output=config.output))
    parts = [_commented(comment), head]
    if batching is not None:
        size = f"max_batch_size: {batching.largest}\n"
        batcher = "dynamic_batching { }\n" if config.dynamic_batching is not None else ""
        parts += ["\n", _commented(batching.reason), size, batcher]
    return "".join([*parts, *(["\n", tensors] if tensors else [])])


def _commented(text: str) -> str:
    lines = (line for paragraph in text.splitlines() for line in textwrap.wrap(paragraph, _COLUMNS))
    return "".join(f"# {line}\n" for line in lines)


def effective(text: str, described: DescribedModel | None) -> ModelConfig:
    """The configuration that a server makes of this text. Raises WeirError if it would reject it."""
    return resolve_config(ConfigSource(parse_config(text.encode(), "config.pbtxt")), described, ())

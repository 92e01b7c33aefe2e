"""`read_model`: the configuration of a model from what a server reports about it.

The server may be Weir or Triton, and newer than this client: fields that this version does not have are ignored.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from weir.schemas.config.model_config import ModelConfig
from weir.schemas.core.tensors import BY_CONFIG_NAME


class InputError(ValueError):
    """The input of a load test can't be made, or does not fit the model. The message is one line."""


def read_model(config: Mapping[str, Any]) -> ModelConfig:
    """The configuration in `config`, as `/v2/models/<model>/config` returns it. Raises InputError if it is not one."""
    document: Any = copy.deepcopy(dict(config))
    try:
        try:
            model = ModelConfig.model_validate(document)
        except ValidationError as error:
            for found in error.errors():
                if found["type"] == "extra_forbidden":
                    _remove(document, found["loc"])
            model = ModelConfig.model_validate(document)
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(map(str, found["loc"]))
        raise InputError(f"the server's configuration of the model is not valid: {where}: {found['msg']}") from error
    for declared in model.input:
        if declared.data_type not in BY_CONFIG_NAME:
            raise InputError(f"input '{declared.name}' of model '{model.name}' has datatype {declared.data_type}")
    return model


def needs_correlation_id(model: ModelConfig) -> bool:
    """Whether each request of the model belongs to a sequence of the caller."""
    sequences = model.sequence_batching
    return sequences is not None and not sequences.iterative_sequence


def has_text_ids(model: ModelConfig) -> bool:
    """Whether the model takes correlation ids as text, and not as numbers."""
    sequences = model.sequence_batching
    return sequences is not None and any(
        control.kind == "CONTROL_SEQUENCE_CORRID" and control.data_type == "TYPE_STRING"
        for declared in sequences.control_input
        for control in declared.control
    )


def _remove(document: Any, location: tuple[int | str, ...]) -> None:
    *parents, last = location
    for part in parents:
        document = document[part]
    document.pop(last, None)

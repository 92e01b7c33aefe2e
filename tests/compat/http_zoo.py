"""The models that the tests of the HTTP door ask; Python's all, so that a Triton without other backends serves them too."""

from __future__ import annotations

import shutil
from pathlib import Path

from model_zoo import SOURCES, Tensors, config_text, write_model

import schemas.datatypes

_OWN_SOURCES = Path(__file__).parent / "http_models"

DATATYPES = list(schemas.datatypes.DATATYPES)


def write(
    root: Path, name: str, source: str, inputs: Tensors, outputs: Tensors, batch: int = 0, more: str = ""
) -> Path:
    """A Python model that runs `http_models/<source>.py`, or `tests/models/<source>.py`."""
    folder = write_model(root, name, config_text(name, "python", inputs, outputs, batch, more))
    own = _OWN_SOURCES / f"{source}.py"
    shutil.copy(own if own.exists() else SOURCES / f"{source}.py", folder / "1" / "model.py")
    return folder


def write_identity(root: Path, datatype: str) -> None:
    """`identity_<datatype>`: one variable dimension, in batches of up to 8; `IN_OUT` is its `IN`."""
    write(root, f"identity_{datatype}", "identity", {"IN": (datatype, [-1])}, {"IN_OUT": (datatype, [-1])}, 8)

"""The models for the tests of the HTTP frontend, and a server of them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.support.models import zoo as model_zoo
from tests.support.models.zoo import Tensors, config_text, write_model
from tests.support.servers.weir_server import Server

_OWN_SOURCES = Path(__file__).parent / "http_models"


def write(
    root: Path, name: str, source: str, inputs: Tensors, outputs: Tensors, batch: int = 0, more: str = ""
) -> Path:
    """A Python model that runs `http_models/<source>.py`, or `tests/models/<source>.py`."""
    folder = write_model(root, name, config_text(name, "python", inputs, outputs, batch, more))
    own = _OWN_SOURCES / f"{source}.py"
    shutil.copy(own if own.exists() else model_zoo.SOURCES / f"{source}.py", folder / "1" / "model.py")
    return folder


def make_optional(folder: Path, *names: str) -> None:
    """Makes these inputs of a model optional."""
    path = folder / "config.pbtxt"
    text = path.read_text()
    for name in names:
        text = text.replace(f'name: "{name}" data_type', f'name: "{name}" optional: true data_type', 1)
    path.write_text(text)


def write_told(root: Path) -> None:
    """`told`: what came with a request, as JSON."""
    write(root, "told", "told", {"ANY": ("FP32", [1])}, {"TOLD": ("BYTES", [1])}, 4)


@contextlib.contextmanager
def serving(
    folder: Path, write_models: Callable[[Path], None], *awaited: str, options: Sequence[str] = ()
) -> Iterator[Server]:
    """A running server with models of its own; those `awaited` are ready, or all of them."""
    (folder / "models").mkdir()
    write_models(folder / "models")
    with Server(folder, folder / "models", *options) as server:
        for model in awaited or [""]:
            server.wait_ready(model)
        yield server
        assert server.in_flight() == 0

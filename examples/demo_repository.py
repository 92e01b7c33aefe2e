"""A small model repository that can be made anywhere: magika's network and a Python model that prepares its input.

The network and its labels come from the installed `magika` package, so that no weights lie in this project.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

DEMO_FOLDER = Path(".weir/demo")
"""Where `make demo` and `make serve` keep what they make, relative to the checkout."""

_SOURCES = Path(__file__).parent / "models"


def build_demo_repository(folder: Path) -> Path:
    """Makes the repository in `folder`, or brings it up to date; returns `folder`."""
    shutil.copytree(_SOURCES, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    network = _magika_network()
    version = folder / "magika" / "1"
    version.mkdir(exist_ok=True)
    shutil.copyfile(network / "model.onnx", version / "model.onnx")
    labels = json.loads((network / "config.min.json").read_text())["target_labels_space"]
    (folder / "magika" / "labels.txt").write_text("".join(f"{label}\n" for label in labels))
    return folder


def _magika_network() -> Path:
    # Not imported: the package would load its own copy of the network's runtime.
    package = find_spec("magika")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("the demo needs the magika package: make install")
    return Path(package.submodule_search_locations[0]) / "models" / "standard_v3_3"

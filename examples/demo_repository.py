"""A model repository that can be made anywhere: a classifier of files, a detector of speech, and a reader of pictures.

The networks come from installed packages (magika, silero-vad, rapidocr-onnxruntime), so that no weights lie in this
project. The packages are not imported, for they would load their own copies of the networks' runtime.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import onnx

from examples.ocr_graph import as_reader, characters
from examples.silero_graph import as_sequence_model

DEMO_FOLDER = Path(".weir/demo")
"""Where `make demo` and `make serve` keep what they make, relative to the checkout."""

_SOURCES = Path(__file__).parent / "models"


def build_demo_repository(folder: Path) -> Path:
    """Makes the repository in `folder`, or brings it up to date; returns `folder`."""
    shutil.copytree(_SOURCES, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for model in folder.iterdir():
        (model / "1").mkdir(exist_ok=True)  # git keeps no empty folder: networks and ensembles have none in the sources
    _add_classifier(folder)
    _add_speech_detector(folder)
    _add_reader(folder)
    return folder


def _add_classifier(folder: Path) -> None:
    network = package_folder("magika") / "models" / "standard_v3_3"
    shutil.copyfile(network / "model.onnx", folder / "magika" / "1" / "model.onnx")
    labels = json.loads((network / "config.min.json").read_text())["target_labels_space"]
    for model in ("magika", "file_kind"):
        (folder / model / "labels.txt").write_text("".join(f"{label}\n" for label in labels))


def _add_speech_detector(folder: Path) -> None:
    network = onnx.load(package_folder("silero_vad") / "data" / "silero_vad_op18_ifless.onnx")
    onnx.save(as_sequence_model(network), folder / "silero_vad" / "1" / "model.onnx")


def _add_reader(folder: Path) -> None:
    networks = package_folder("rapidocr_onnxruntime") / "models"
    shutil.copyfile(networks / "ch_PP-OCRv4_det_infer.onnx", folder / "ocr_det" / "1" / "model.onnx")
    reader = onnx.load(networks / "ch_PP-OCRv4_rec_infer.onnx")
    onnx.save(as_reader(reader), folder / "ocr_rec" / "1" / "model.onnx")
    (folder / "ocr_decode" / "1" / "characters.txt").write_text("\n".join(characters(reader)), "utf-8", newline="\n")


def package_folder(name: str) -> Path:
    """Where an installed package lies; ends the program if there is none of that name."""
    package = find_spec(name)
    if package is None or not package.submodule_search_locations:
        raise SystemExit(f"the examples need the package {name}: make install")
    return Path(package.submodule_search_locations[0])

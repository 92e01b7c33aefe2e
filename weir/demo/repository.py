"""The model repositories of the demo: a classifier of files and a detector of speech, and a reader of pictures.

The reader has a repository of its own, because its Python models need OpenCV, which Weir's images do not have.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import onnx

from weir.demo.networks import MAGIKA, NETWORKS, RAPIDOCR, SILERO, Network, package_folder
from weir.demo.ocr_graph import as_reader, characters
from weir.demo.silero_graph import as_sequence_model

_SOURCES = Path(__file__).parent / "models"


def build_demo_repositories(folder: Path, networks: Sequence[Network] = NETWORKS) -> tuple[Path, ...]:
    """Create the repositories of these networks in `folder`, or update them; returns them.

    `models` has what an image of Weir can serve, `picture-models` the reader. Raises StartError as
    `build_demo_repository`.
    """
    pictures = folder / "picture-models"
    models = build_demo_repository(folder / "models", [network for network in networks if network is not RAPIDOCR])
    if RAPIDOCR in networks:
        return models, build_demo_repository(pictures, [RAPIDOCR])
    shutil.rmtree(pictures, ignore_errors=True)
    return (models,)


def build_demo_repository(folder: Path, networks: Sequence[Network] = NETWORKS) -> Path:
    """Create the models of these networks in `folder`, or update them; returns `folder`.

    Models of other networks are removed. Raises StartError if the package of a network is not installed.
    """
    wanted = {model for network in networks for model in network.models}
    for source in _SOURCES.iterdir():
        model = folder / source.name
        if source.name not in wanted:
            shutil.rmtree(model, ignore_errors=True)
            continue
        shutil.copytree(source, model, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        (model / "1").mkdir(exist_ok=True)  # the sources of networks and ensembles have no version folder
    for network in networks:
        _ADDERS[network](folder)
    return folder


def _add_classifier(folder: Path) -> None:
    network = package_folder(MAGIKA.package) / "models" / "standard_v3_3"
    shutil.copyfile(network / "model.onnx", folder / "magika" / "1" / "model.onnx")
    labels = json.loads((network / "config.min.json").read_text())["target_labels_space"]
    for model in ("magika", "file_kind"):
        (folder / model / "labels.txt").write_text("".join(f"{label}\n" for label in labels))


def _add_speech_detector(folder: Path) -> None:
    network = onnx.load(package_folder(SILERO.package) / "data" / "silero_vad_op18_ifless.onnx")
    onnx.save(as_sequence_model(network), folder / "silero_vad" / "1" / "model.onnx")


def _add_reader(folder: Path) -> None:
    networks = package_folder(RAPIDOCR.package) / "models"
    shutil.copyfile(networks / "ch_PP-OCRv4_det_infer.onnx", folder / "ocr_det" / "1" / "model.onnx")
    reader = onnx.load(networks / "ch_PP-OCRv4_rec_infer.onnx")
    onnx.save(as_reader(reader), folder / "ocr_rec" / "1" / "model.onnx")
    (folder / "ocr_decode" / "1" / "characters.txt").write_text("\n".join(characters(reader)), "utf-8", newline="\n")


_ADDERS = {MAGIKA: _add_classifier, SILERO: _add_speech_detector, RAPIDOCR: _add_reader}

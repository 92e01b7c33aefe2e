"""Ensembles for tests, and the models of their steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onnx import helper

from tests.support.models.zoo import (
    LABELS,
    Tensors,
    config_text,
    write_graph,
    write_identity,
    write_model,
    write_python_model,
    write_slow,
    write_versions,
)

Step = tuple[str, dict[str, str], dict[str, str]]
"""(model, or `model:version`; tensors it takes; tensors it writes): the model's name of each, and the ensemble's."""

NUMBERS: Tensors = {"X": ("INT32", [-1])}
OUT: Tensors = {"Y": ("INT32", [-1])}
DECOUPLED = "model_transaction_policy { decoupled: true }"


def ensemble_text(
    name: str, inputs: Tensors, outputs: Tensors, steps: Sequence[Step], batch: int = 0, more: str = ""
) -> str:
    """The `config.pbtxt` of an ensemble; `more` is a part of `ensemble_scheduling`."""
    rows = "\n".join(map(_step_text, steps))
    text = config_text(name, "", inputs, outputs, batch, f"ensemble_scheduling {{ {rows} {more} }}")
    return text.replace('backend: ""', 'platform: "ensemble"')


def _step_text(step: Step) -> str:
    model, taken, written = step
    name, _, version = model.partition(":")
    maps = [("input_map", taken), ("output_map", written)]
    rows = " ".join(
        f'{field} {{ key: "{of_model}" value: "{tensor}" }}'
        for field, names in maps
        for of_model, tensor in names.items()
    )
    return f'step {{ model_name: "{name}" model_version: {version or -1} {rows} }}'


def write_ensemble(
    root: Path, name: str, inputs: Tensors, outputs: Tensors, steps: Sequence[Step], batch: int = 0, more: str = ""
) -> Path:
    """An ensemble of models that must be written, too."""
    return write_model(root, name, ensemble_text(name, inputs, outputs, steps, batch, more))


def write_steps(root: Path) -> None:
    """The models that the ensembles of the tests are made of."""
    outputs: Tensors = {"OUT": ("INT32", [-1]), "TOLD": ("BYTES", [1])}
    write_python_model(root, "step", "step", {"IN": ("INT32", [-1])}, outputs, 8, "dynamic_batching { }")
    write_python_model(root, "repeat", "step", {"IN": ("INT32", [-1])}, {"OUT": ("INT32", [-1])}, 8, DECOUPLED)
    maybe = write_python_model(
        root, "maybe", "step", {"IN": ("INT32", [-1]), "EXTRA": ("INT32", [-1])}, {"TOLD": ("BYTES", [1])}, 8
    )
    _make_optional(maybe, "EXTRA")
    write_identity(root, "copy", "FP32")
    write_identity(root, "copy_int", "INT32")
    _write_classes(root)
    write_slow(root, "slow_step", "")
    write_versions(root, "plus", "version_policy { all { } }")


def _make_optional(model: Path, name: str) -> None:
    path = model / "config.pbtxt"
    path.write_text(path.read_text().replace(f'{{ name: "{name}"', f'{{ optional: true name: "{name}"'))


def _write_classes(root: Path) -> None:
    config = config_text("classes", "onnxruntime", {"IN": ("FP32", [5])}, {"OUT": ("FP32", [5])}, 8)
    folder = write_model(root, "classes", config.replace('"OUT"', '"OUT" label_filename: "labels.txt"'))
    (folder / "labels.txt").write_text("\n".join(LABELS) + "\n")
    node = helper.make_node("Identity", ["IN"], ["OUT"])
    write_graph(folder / "1" / "model.onnx", [node], {"IN": ("FP32", [-1, 5])}, {"OUT": ("FP32", [-1, 5])})


CHAIN: list[Step] = [("step", {"IN": "X"}, {"OUT": "M"}), ("step", {"IN": "M"}, {"OUT": "Y", "TOLD": "T"})]


def write_ledger_ensembles(root: Path) -> None:
    """Ensembles of two steps each that can be asked what `ledger` asks."""
    write_identity(root, "fast_step", "INT64", "dynamic_batching { }")
    write_slow(root, "slow_step")
    steps: list[Step] = [("fast_step", {"IN": "IN"}, {"OUT": "M"}), ("fast_step", {"IN": "M"}, {"OUT": "OUT"})]
    write_ensemble(root, "fast", {"IN": ("INT64", [-1])}, {"OUT": ("INT64", [-1])}, steps, 8)
    delay = {"DELAY_MS": "DELAY_MS"}
    steps = [
        ("slow_step", {"VALUE": "VALUE", **delay}, {"VALUE_OUT": "M"}),
        ("slow_step", {"VALUE": "M", **delay}, {"VALUE_OUT": "VALUE_OUT", "BATCH": "BATCH"}),
    ]
    inputs: Tensors = {"VALUE": ("INT64", [1]), "DELAY_MS": ("FP32", [1])}
    write_ensemble(root, "slow", inputs, {"VALUE_OUT": ("INT64", [1]), "BATCH": ("INT32", [1])}, steps, 8)


def write_ensembles(root: Path) -> None:
    """One ensemble for each thing that they can be asked."""
    write_ensemble(root, "chain", NUMBERS, {**OUT, "T": ("BYTES", [1]), "M": ("INT32", [-1])}, CHAIN, 8)
    write_ensemble(
        root,
        "fan",
        NUMBERS,
        {**OUT, "Z": ("INT32", [-1])},
        [
            ("step", {"IN": "X"}, {"OUT": "M"}),
            ("step", {"IN": "M"}, {"OUT": "Y"}),
            ("copy_int", {"IN": "M"}, {"OUT": "Z"}),
        ],
        8,
    )
    folder = write_ensemble(
        root,
        "optional",
        {**NUMBERS, "E": ("INT32", [-1])},
        {"T": ("BYTES", [1])},
        [("maybe", {"IN": "X", "EXTRA": "E"}, {"TOLD": "T"})],
        8,
    )
    _make_optional(folder, "E")
    scores: Tensors = {"X": ("FP32", [5])}
    write_ensemble(root, "classified", scores, {"Y": ("FP32", [5])}, [("classes", {"IN": "X"}, {"OUT": "Y"})], 8)
    write_ensemble(
        root, "counted", NUMBERS, OUT, [("repeat", {"IN": "X"}, {"OUT": "M"}), (*CHAIN[1][:2], {"OUT": "Y"})], 8
    )
    copies: list[Step] = [
        ("copy", {"IN": "X"}, {"OUT": "A"}),
        ("copy", {"IN": "A"}, {"OUT": "B"}),
        ("copy", {"IN": "B"}, {"OUT": "Y"}),
    ]
    write_ensemble(root, "large", {"X": ("FP32", [-1])}, {"Y": ("FP32", [-1]), "A": ("FP32", [-1])}, copies, 8)
    write_ensemble(
        root,
        "versions",
        {"X": ("FP32", [1])},
        {"TWO": ("FP32", [1]), "LAST": ("FP32", [1])},
        [("plus:2", {"IN": "X"}, {"OUT": "TWO"}), ("plus", {"IN": "X"}, {"OUT": "LAST"})],
    )
    patient: Tensors = {"VALUE": ("INT64", [1]), "DELAY_MS": ("FP32", [1])}
    waits = ("slow_step", {"VALUE": "VALUE", "DELAY_MS": "DELAY_MS"}, {"VALUE_OUT": "M"})
    again = ("slow_step", {"VALUE": "M", "DELAY_MS": "DELAY_MS"}, {"VALUE_OUT": "VALUE_OUT"})
    write_ensemble(root, "patient", patient, {"VALUE_OUT": ("INT64", [1])}, [waits, again], 8)
    write_ensemble(
        root, "narrow", patient, {"VALUE_OUT": ("INT64", [1])}, [waits, again], 8, "max_inflight_requests: 1"
    )

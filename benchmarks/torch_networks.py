"""PyTorch networks for `benchmarks.backends`: a text encoder as `.pt2`, convolutions as TorchScript.

Their weights are random, which does not affect the time. Each network has functions that write its file into a version
folder, open it without a server, and make the inputs of a request.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = 64
WORDS = 8_000
WIDTH = 384
MOST = 32
"""The largest batch that the encoder is exported for."""

Arrays = Mapping[str, np.ndarray]
Engine = Callable[[Arrays], Sequence[np.ndarray]]


def write_encoder(version: Path) -> None:
    """`model.pt2`: six layers of 384 with 12 heads, as MiniLM's, and the mean of all tokens."""
    import torch

    torch.manual_seed(0)

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(WORDS, WIDTH)
            self.places = torch.nn.Parameter(torch.randn(TOKENS, WIDTH))
            layer = torch.nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, activation="gelu", batch_first=True)
            self.layers = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.layers(self.words(input_ids) + self.places).mean(1)

    batch = torch.export.Dim("batch", min=1, max=MOST)
    example = torch.zeros((2, TOKENS), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(Encoder().eval(), (example,), dynamic_shapes=({0: batch},))
        torch.export.save(program, str(version / "model.pt2"))


def open_program(version: Path, outputs: Sequence[str]) -> Engine:
    """The program as torch alone runs it, with one thread."""
    import torch

    torch.set_num_threads(1)
    return _engine(torch, torch.export.load(str(version / "model.pt2")).module())


def tokens(random: np.random.Generator) -> dict[str, np.ndarray]:
    """One text."""
    return {"input_ids": random.integers(0, WORDS, (1, TOKENS), dtype=np.int64)}


def write_convolutions(version: Path) -> None:
    """`model.pt`: a classifier of small pictures, 18 convolutions deep, as ResNet's smallest."""
    import torch

    torch.manual_seed(0)

    class Block(torch.nn.Module):
        def __init__(self, narrow: int, wide: int) -> None:
            super().__init__()
            stride = 1 if narrow == wide else 2
            self.first = torch.nn.Conv2d(narrow, wide, 3, stride, 1, bias=False)
            self.first_norm = torch.nn.BatchNorm2d(wide)
            self.second = torch.nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
            self.second_norm = torch.nn.BatchNorm2d(wide)
            self.around = torch.nn.Conv2d(narrow, wide, 1, stride, bias=False) if stride > 1 else torch.nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = torch.relu(self.first_norm(self.first(x)))
            return torch.relu(self.second_norm(self.second(inner)) + self.around(x))

    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [Block(narrow, wide) for narrow, wide in pairwise(widths)]
    stem = torch.nn.Conv2d(3, widths[0], 7, 2, 3)
    head = (torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(widths[-1], 1000))
    network = torch.nn.Sequential(stem, torch.nn.ReLU(), torch.nn.MaxPool2d(2), *blocks, *head).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.freeze(torch.jit.script(network)).save(str(version / "model.pt"))


def open_script(version: Path, outputs: Sequence[str]) -> Engine:
    """The TorchScript module as torch alone runs it, with one thread."""
    import torch

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _engine(torch, torch.jit.load(str(version / "model.pt")).eval())


def picture(random: np.random.Generator) -> dict[str, np.ndarray]:
    """One picture of 96 by 96."""
    return {"input": random.standard_normal((1, 3, 96, 96), np.float32)}


def _engine(torch: Any, module: Any) -> Engine:
    def run(inputs: Arrays) -> Sequence[np.ndarray]:
        with torch.inference_mode():
            return [module(*(torch.from_numpy(array) for array in inputs.values())).numpy()]

    return run


ENCODER = ("encoder", "pytorch", 16, ("OUTPUT__0",), write_encoder, open_program, tokens)
CONVOLUTIONS = ("convolutions", "pytorch", 8, ("OUTPUT__0",), write_convolutions, open_script, picture)
"""Name, backend, batch, outputs and the three functions, in the order in which `benchmarks.backends.Network` takes them."""

"""Serves three models with backends of one's own, those of `examples/backends`, and asks them.

    python -m examples.own_backends

The first is a regression fitted here and run by `linear/backend.py`, the second a list of words run by `keywords/model.py`,
the third a table of vectors searched by `nearest/backend.py`, on a GPU where there is one with CuPy.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from weir import Server

BACKENDS = Path(__file__).parent / "backends"


def build_repository(folder: Path) -> None:
    """Writes a model for each of the backends: one line of configuration, and a file with what it knows."""
    for name, backend in (("prices", "linear"), ("topics", "keywords"), ("similar", "nearest")):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(f'backend: "{backend}"\n')
    rooms_and_area = np.array([[2, 50], [3, 70], [4, 110], [5, 120]])
    prices = np.array([[200], [280], [400], [450]])
    (*weights, bias), *_ = np.linalg.lstsq(np.column_stack([rooms_and_area, np.ones(4)]), prices, rcond=None)
    np.savez(folder / "prices" / "1" / "weights.npz", weights=weights, bias=bias)
    (folder / "topics" / "1" / "words.txt").write_text("queue\nbatch\nmodel\n")
    np.save(folder / "similar" / "1" / "vectors.npy", np.array([[1, 0], [0, 1], [1, 1], [-1, 0]], np.float32))


def main() -> None:
    """The program."""
    with tempfile.TemporaryDirectory() as folder:
        build_repository(Path(folder))
        with Server(folder, backend_directory=[str(BACKENDS)]) as server:
            price = server.infer("prices", {"X": ([[3, 80]], "FP32")})["Y"]
            counts = server.infer("topics", {"TEXT": [[b"The model takes a batch from the queue of the model"]]})[
                "COUNTS"
            ]
            similar = server.infer("similar", {"QUERY": ([[2, 0.1]], "FP32")})["INDEX"]
    print("Served by backends of one's own")
    print(f"linear    3 rooms of 80 square metres cost {price.item():.0f} thousand")
    print(f"keywords  queue {counts[0, 0]}, batch {counts[0, 1]}, model {counts[0, 2]}")
    print(f"nearest   rows {', '.join(map(str, similar[0]))} are most similar to (2, 0.1)")


if __name__ == "__main__":
    main()

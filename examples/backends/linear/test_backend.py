"""Tests of the backend `linear`, which pytest runs without a server."""

from pathlib import Path

import numpy as np

from weir.testing import run_backend


def test_a_batch_of_two_requests(tmp_path: Path) -> None:
    folder = tmp_path / "prices"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text('backend: "linear"')
    np.savez(folder / "1" / "weights.npz", weights=np.array([[2.0], [3.0]]), bias=np.array([1.0]))
    with run_backend(folder, backend_directory=Path(__file__).parents[1]) as model:
        assert model.infer({"X": [[1, 1]]})["Y"].tolist() == [[6]]
        one, two = model.batch({"X": [[1, 2]]}, {"X": [[0, 0], [1, 0]]})
        assert [one["Y"].tolist(), two["Y"].tolist()] == [[[9]], [[1], [3]]]

"""Makes text of the characters that were seen in the columns of each line.

A character is as wide as several columns, and the network puts a blank between two that are the same: repetitions are
dropped first, blanks then (CTC).
"""

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

BLANK = 0


class TritonPythonModel:
    """Makes text of the characters that the reader saw."""

    def initialize(self, args):
        # Split at line feeds alone: some of the characters are line ends of other kinds.
        self.characters = np.array(
            Path(__file__).with_name("characters.txt").read_text("utf-8").split("\n"), np.object_
        )

    def execute(self, requests):
        return [pb_utils.InferenceResponse(self.tensors_of(request)) for request in requests]

    def tensors_of(self, request):
        lines = len(pb_utils.get_input_tensor_by_name(request, "BOX").as_numpy())
        seen = pb_utils.get_input_tensor_by_name(request, "CHARACTER").as_numpy()[:lines]
        certain = pb_utils.get_input_tensor_by_name(request, "CERTAINTY").as_numpy()[:lines]
        read = [self.text(*columns) for columns in zip(seen, certain, strict=True)]
        return [
            pb_utils.Tensor("TEXT", np.array([text.encode() for text, _ in read], np.object_)),
            pb_utils.Tensor("SCORE", np.array([score for _, score in read], np.float32)),
        ]

    def text(self, seen, certain):
        """(what is read in one line, the mean certainty of its characters)."""
        kept = (seen != BLANK) & (np.diff(seen, prepend=BLANK) != 0)
        return "".join(self.characters[seen[kept]]), float(certain[kept].mean()) if kept.any() else 0.0

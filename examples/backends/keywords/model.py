"""Counts words: how often each line of `words.txt`, in the version's folder, stands in a text.

A Python-based backend of Triton's form: one `TritonPythonModel` for all models that name it, which bring data alone.
"""

from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        config.set_max_batch_size(64)
        config.set_dynamic_batching()
        config.add_input({"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "COUNTS", "data_type": "TYPE_INT32", "dims": [-1]})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        folder = Path(args["model_repository"], args["model_version"])
        self.words = (folder / "words.txt").read_text("utf-8").splitlines()

    def execute(self, requests: list[Any]) -> list[Any]:
        return [pb_utils.InferenceResponse([self.counts(request)]) for request in requests]

    def counts(self, request: Any) -> Any:
        texts = [text.decode().lower().split() for text in request.inputs()[0].as_numpy()[:, 0]]
        counts = [[text.count(word) for word in self.words] for text in texts]
        return pb_utils.Tensor("COUNTS", np.array(counts, np.int32))

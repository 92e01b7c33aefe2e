"""`ConsoleServer`: a `weir serve` with a console that may change things, and what a test does with it.

`write_models` makes its repository: models that batch, have labels and versions, are slow, wait for a file, or fail.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient import http as triton

from tests.support.models.gated import write_gated_model
from tests.support.models.zoo import write_classes, write_faulty, write_identity, write_slow, write_versions
from tests.support.servers.weir_server import Server

BATCHED = "batched"
DELAYED = "delayed"
"""As `BATCHED`, for the one test that looks at all of its batches."""

DELAY_US = 20_000

SCORES = [0.1, 0.9, 0.3, 0.5, 0.2]
"""Values of model `classes` by label: bee is the best."""


def write_models(root: Path) -> None:
    """The repository of the console's tests."""
    root.mkdir()
    write_classes(root)
    write_versions(root, "versions", "version_policy { all { } }")
    write_slow(root)
    write_faulty(root)
    write_gated_model(root, "gated", "", 8)
    for name in (BATCHED, DELAYED):
        write_identity(root, name, "FP32", f"dynamic_batching {{ max_queue_delay_microseconds: {DELAY_US} }}")


class ConsoleServer(Server):
    """The server. `console_url` is where its page is."""

    def __init__(self, folder: Path, repository: Path, *options: str) -> None:
        (folder / "jobs").mkdir()
        console = "--console-port=0", "--console-allow-changes", f"--batch-root={folder / 'jobs'}"
        control = "--model-control-mode=explicit", "--load-model=*"
        super().__init__(folder, repository, *console, *control, *options)
        self.console_url = self.printed_value("console")

    def api(self, method: str, path: str, body: bytes | None = None) -> Any:
        """The JSON at a path of the gateway's HTTP API. Raises urllib.error.HTTPError."""
        request = urllib.request.Request(f"http://{self.http_place}{path}", body, method=method)
        with urllib.request.urlopen(request, timeout=15) as answer:
            content = answer.read()
        return json.loads(content) if content else None

    def dies(self) -> str:
        """Submits a durable request that ends the process of its model each time; returns its id."""
        inputs = [{"name": "WHAT", "datatype": "BYTES", "shape": [1, 1], "data": ["kill"]}]
        url = f"http://{self.http_place}/v2/models/faulty/infer"
        request = urllib.request.Request(url, json.dumps({"inputs": inputs}).encode(), {"Prefer": "respond-async"})
        with urllib.request.urlopen(request, timeout=15) as answer:
            return str(json.load(answer)["id"])

    def classify(self, requests: int = 1) -> None:
        """Sends so many requests to model `classes`, one after another."""
        with self.http() as client:
            for _ in range(requests):
                client.infer("classes", [tensor("IN", np.array([SCORES], np.float32))])

    def version_served(self) -> str:
        """The version of model `versions` that a request without a version runs on."""
        with self.http() as client:
            result = client.infer("versions", [tensor("IN", np.array([10], np.float32))])
        return str(int(result.as_numpy("OUT")[0] - 10))


def tensor(name: str, values: np.ndarray) -> triton.InferInput:
    """An input of a request."""
    kinds = {"float32": "FP32", "int64": "INT64"}
    made = triton.InferInput(name, list(values.shape), kinds[str(values.dtype)])
    made.set_data_from_numpy(values)
    return made
